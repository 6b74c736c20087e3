"""A train.py that ends in a second, for tests: a smaller model, a warm-up of 20 steps, a coin for a reward.

`python tests/tiny_run.py FLAGS` is such a run; `start` begins one in a process that is forked from a server which has
torch loaded already, so that it may be killed again and again.
"""
import multiprocessing
import os
import resource
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import train
from model import GPTConfig

torch.optim.AdamW([torch.zeros(1, requires_grad=True)])     # the first one loads half of torch: once for all processes

SMALL = GPTConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                  num_key_value_heads=1, head_dim=8, max_position_embeddings=160)
FLAGS = ("--prompts 4 --group_size 4 --max_new_tokens 12 --eval_problems 6 --eval_samples 2 --eval_every 5 --lr 1e-2 "
         "--clip_grad 0").split()


def coin(text, gold):
    """A reward that has nothing to do with the problem, but makes about half of the answers right."""
    return float(zlib.crc32(text.encode()) % 2)


def shrink(patch=setattr, patch_item=dict.__setitem__):
    """Make train.py tiny, and without pictures, by the means of pytest's monkeypatch, which undoes it."""
    patch_item(sys.modules, "assets.pictures", None)
    tasks = {name: task._replace(warmup={2: 40}, levels=(2,), warmup_steps=20) for name, task in train.TASKS.items()}
    for name, value in (("TASKS", tasks), ("SIZES", {**train.SIZES, "tiny": SMALL}), ("TRAIN_PROBLEMS", 60),
                        ("WARMUP_BATCH", 8), ("reward", coin)):
        patch(train, name, value)


def stuck_in_save(number):
    """From the `number`-th torch.save on, write half of a checkpoint and wait to be killed."""
    save, calls = torch.save, []

    def half(state, file):
        calls.append(1)
        if len(calls) < number:
            return save(state, file)
        file.write(b"PK\x03\x04 half of a checkpoint")
        file.flush()
        time.sleep(60)
    torch.save = half


def child(arguments, folder, stuck, limit):
    """The body of a process that `start` began: output goes to the files stdout and stderr of `folder`."""
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", buffering=1, closefd=False) for n in (1, 2))
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if stuck:
        stuck_in_save(stuck)
    torch.set_num_threads(1)
    shrink()
    sys.exit(train.main(arguments))


def start(arguments, folder, stuck=0, limit=0):
    """Begin `python train.py ARGUMENTS` in a folder; returns the process (pid, kill, join, exitcode)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_run"])
    process = context.Process(target=child, args=([*FLAGS, *arguments], str(folder), stuck, limit))
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{before}"      # where the server finds tiny_run
    process.start()
    os.environ["PYTHONPATH"] = before
    return process


if __name__ == "__main__":
    torch.set_num_threads(1)
    shrink()
    sys.exit(train.main([*FLAGS, *sys.argv[1:]]))

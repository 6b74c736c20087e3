"""Train a GPT on a verifier's reward alone: sample, verify, weigh, score, select, update.

`python train.py` first warms a small GPT up on worked examples of short problems, then lets it learn longer ones by
reinforcement: GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783) or DAPO (2503.14476) on the 20% of tokens that GMTS
(2608.30632) selects.  Several names after --select, or several seeds, make a comparison.  `reinforce` is the method;
the rest gets it going and writes down what it does.  `python train.py --help` explains every flag.

Shapes: P prompts, G answers per prompt, B = P * G answers, T padded length, N tokens trained on, V vocabulary.
"""
import argparse
import contextlib
import copy
import csv
import functools
import hashlib
import json
import math
import os
import random
import signal
import sys
import time
from collections import namedtuple
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from tqdm import tqdm

from gmts import (SELECTIONS, group_advantages, learning_coefficient, loss_weights, policy_objective, select_tokens,
                  token_scores)
from model import GPT, SIZES, byte_tokenizer, load_pretrained
from rollout import Rollout, generate, micro_batches, position_budget, score, token_logits
from verify import DOMAINS, extract_answer, load_problems, make_problems, reward

# Warm-up: worked examples of each level.  Reinforcement: longer chains than any of them had.
Task = namedtuple("Task", "warmup levels warmup_steps warmup_lr")
TASKS = {
    "math": Task({1: 400, 2: 6000, 3: 6000}, (3, 4, 5), 2000, 3e-3),
    "code": Task({1: 4000, 2: 6000, 3: 6000}, (3, 4, 5), 2000, 3e-3),
    "logic": Task({1: 4000, 2: 6000, 3: 6000}, (3, 4, 5), 2000, 3e-3),
}
ASK = "{question}\nThink step by step and end with #### and the answer."
TEMPLATES = {"bytes": "<|question|>{question}<|answer|>", "base": f"Question: {ASK}\nAnswer:",
             "chat": f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n"}
FORMAT = 1                          # of checkpoint.pt; a file of another format is refused
WARMUP_FOLDER, WARMUP_BATCH = Path("out/warmup"), 32
TRAIN_PROBLEMS = 2000               # per level; a run starts over when it has seen them all
EVAL_ROWS = 512                     # answers that an evaluation decodes at once
MAX_ROUNDS = 5                      # how often dapo samples anew in search of live groups
METRICS = ("step reward pass_rate dead_groups truncated no_answer length length_right length_wrong entropy entropy_kept "
           "kept_share overlap_entropy kept_right ratio_max clip_share kl grad_norm lr tokens_per_s rollout_s score_s "
           "update_s").split()


# What an option allows, in words and as a test of one value.
COUNT = "a whole number from 1", lambda value: value >= 1
NOT_NEGATIVE = "a number from 0", lambda value: 0 <= value < math.inf
POSITIVE = "a number above 0", lambda value: 0 < value < math.inf
SHARE = "above 0 and at most 1", lambda value: 0 < value <= 1


def one_of(*names):
    return f"one of {', '.join(names)}", lambda value: value in names


def option(default, text, allowed="text", check=lambda value: True):
    """A field of Config: its default, its help text, and what it allows."""
    return field(default=default, metadata={"help": text, "allowed": allowed, "check": check})


@dataclass
class Config:
    """Everything that a run depends on; every field is a flag of the same name."""
    domain: str = option("math", "synthetic problems to learn", *one_of(*DOMAINS))
    level: int = option(0, "length of the problems; 0 mixes the domain's own", "0 to 8", lambda value: 0 <= value <= 8)
    size: str = option("tiny", "size of a model that starts from random weights", *one_of(*SIZES))
    select: tuple = option(("gmts",), "how tokens are chosen; several compare", *one_of("random", *SELECTIONS))
    keep: float = option(0.2, "share of the sampled tokens that is trained on", *SHARE)
    scope: str = option("batch", "within what that share is counted", *one_of("batch", "group", "answer"))
    bottom: bool = option(False, "keep the lowest scores instead, as a control")
    loss: str = option("grpo", "objective; dapo samples until no group is dead", *one_of("grpo", "dapo", "dr_grpo"))
    clip_low: float = option(0.2, "lower clip of the ratio", "from 0 to 1", lambda value: 0 <= value <= 1)
    clip_high: float = option(0.28, "upper clip of the ratio", *NOT_NEGATIVE)
    beta: float = option(0.0, "weight of the KL term towards the model at the start", *NOT_NEGATIVE)
    prompts: int = option(16, "prompts per step", *COUNT)
    group_size: int = option(8, "answers per prompt", "a whole number from 2", lambda value: value >= 2)
    steps: int = option(60, "steps of reinforcement", *COUNT)
    inner_batches: int = option(1, "slices of a step's answers, one optimizer step each", *COUNT)
    epochs: int = option(1, "passes over a step's answers", *COUNT)
    lr: float = option(5e-4, "learning rate of reinforcement", *POSITIVE)
    clip_grad: float = option(1.0, "largest gradient norm; 0 does not clip", *NOT_NEGATIVE)
    temperature: float = option(1.0, "sampling temperature", *POSITIVE)
    top_p: float = option(1.0, "sample from the likeliest tokens that hold this probability", *SHARE)
    max_new_tokens: int = option(96, "longest answer, in tokens", *COUNT)
    seed: tuple = option((0,), "random seed; several compare", "whole numbers from 0", lambda value: value >= 0)
    device: str = option("auto", "where to compute", *one_of("auto", "cpu", "cuda", "mps"))
    dtype: str = option("auto", "of matrix products; weights stay float32", *one_of("auto", "float32", "bfloat16"))
    compile: bool = option(False, "run the training forward through torch.compile")
    out: str = option("", "the run's folder; empty takes a free name under out/")
    resume: bool = option(False, "go on with the run in --out, or with the newest one")
    model: str = option("", "Hugging Face model folder to start from, instead of a warm-up")
    data: str = option("", "JSON Lines file with problems to train on")
    eval_data: str = option("", "JSON Lines file with held-out problems")
    template: str = option("", "prompt around {question}; special tokens may stand only here")
    eval_every: int = option(20, "steps between evaluations", *COUNT)
    eval_samples: int = option(8, "answers per held-out problem", *COUNT)
    eval_problems: int = option(256, "held-out problems", *COUNT)

    def check(self):
        """ValueError, one line with the flag, the value and what is allowed, if this cannot work."""
        for f in fields(self):
            value = getattr(self, f.name)
            for one in value if isinstance(value, tuple) else (value,):
                if not f.metadata["check"](one):
                    raise ValueError(f"--{f.name} {one}: allowed is {f.metadata['allowed']}")
        dapo, available = self.loss == "dapo", {"auto", "cpu", accelerator()}
        for wrong, message in (
            (self.prompts % self.inner_batches, f"--inner_batches {self.inner_batches}: has to divide --prompts"),
            (dapo and self.epochs > 1, f"--epochs {self.epochs}: dapo samples afresh for each pass, allowed is 1"),
            (dapo and self.beta, f"--beta {self.beta}: dapo has no KL term, allowed is 0"),
            (self.template and self.template.count("{question}") != 1, "--template: has to hold {question} once"),
            (bool(self.data) != bool(self.eval_data), "--data and --eval_data: give both or neither"),
            (self.device not in available, f"--device {self.device}: here is only {', '.join(sorted(available))}"),
            *((path and not Path(path).exists(), f"--{name} {path}: no such file or folder") for name, path in
              (("data", self.data), ("eval_data", self.eval_data), ("model", self.model))),
        ):
            if wrong:
                raise ValueError(message)


def accelerator():
    """The best device here: "cuda", "mps", "cpu"."""
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"


def say(text):
    """Print a line past the progress bar; a reader who closed the pipe (`| head`) does not end the run."""
    try:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


# ---- a run, and getting ready

class Run:
    """A model, its problems, and everything that changes while it learns."""

    def __init__(self, config, model, tokenizer, template, problems, eval_problems):
        self.config, self.model, self.tokenizer, self.template = config, model, tokenizer, template
        self.problems, self.eval_problems = problems, eval_problems
        self.folder, self.device = Path(config.out), model.embed.weight.device
        self.forward = torch.compile(model, dynamic=True) if config.compile else model
        self.sampler = torch.Generator(self.device).manual_seed(config.seed[0])     # draws the answers
        self.selector = torch.Generator(self.device).manual_seed(config.seed[0])    # draws the scores of "random"
        self.optimizer = torch.optim.AdamW(model.parameters(), config.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.reference = None               # of the KL term: `train` fixes it when the first weights are there
        self.step, self.position, self.warned = 0, 0, []

    def encode(self, question):
        """Token ids of the prompt.  Special tokens come from the template alone: in a question they are plain text."""
        before, after = self.template.split("{question}")
        return (self.tokenizer.encode(before, allowed_special="all") + self.tokenizer.encode_ordinary(question)
                + self.tokenizer.encode(after, allowed_special="all"))

    def next_problems(self, n):
        """The next n training problems; their order depends on the seed alone and is another in each pass."""
        size, first = len(self.problems), self.position
        self.position += n
        return [self.problems[shuffled(size, f"{self.config.seed[0]}/{i // size}")[i % size]]
                for i in range(first, first + n)]

    def grade(self, problems, samples, temperature, generator):
        """Sample answers and verify them: Rollout of B rows, B texts, rewards (P, G)."""
        c, prompts = self.config, [self.encode(p.question) for p in problems]
        with self.autocast():
            rollout = generate(self.model, prompts, samples, c.max_new_tokens, self.model.config.eos_token_ids,
                               temperature, c.top_p, generator)
        texts = [self.tokenizer.decode(ids) for ids in rollout.answers()]
        rewards = [reward(text, problems[i // samples].answer) for i, text in enumerate(texts)]
        return rollout, texts, torch.tensor(rewards, device=self.device).view(-1, samples)

    def autocast(self):
        """bfloat16 matrix products where asked for; the weights, their updates and every softmax stay in fp32."""
        low = self.config.dtype == "bfloat16" or (self.config.dtype == "auto" and self.device.type == "cuda")
        return torch.autocast(self.device.type, torch.bfloat16) if low else contextlib.nullcontext()

    def warn(self, name, text):
        """Say what looks wrong and what to try, once per run."""
        if name not in self.warned:
            self.warned.append(name)
            say(f"warning, step {self.step}: {text}")

    def save(self):
        """Write checkpoint.pt: all that a bit-for-bit continuation needs, and how long the other files are by now."""
        write_checkpoint(self.folder / "checkpoint.pt", {
            "config": asdict(self.config), "step": self.step, "position": self.position, "warned": self.warned,
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "reference": self.reference.state_dict() if self.reference else {},
            "sampler": self.sampler.get_state(), "selector": self.selector.get_state(),
            "lengths": {name: (self.folder / name).stat().st_size for name in ("metrics.csv", "samples.txt")}})

    def restore(self):
        """Go back to checkpoint.pt; returns how long the other files were.  ValueError if it is of another model."""
        state = read_checkpoint(self.folder / "checkpoint.pt")
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.config.beta:
                self.reference = frozen(self.model)
                self.reference.load_state_dict(state["reference"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise ValueError(f"{self.folder / 'checkpoint.pt'} is of another model than its config.json") from error
        self.step, self.position, self.warned = state["step"], state["position"], state["warned"]
        self.sampler.set_state(state["sampler"])
        self.selector.set_state(state["selector"])
        return state["lengths"]


def frozen(model):
    """A copy that does not learn."""
    return copy.deepcopy(model).requires_grad_(False)


@functools.lru_cache(maxsize=4)
def shuffled(n, seed):
    """The numbers 0..n-1 in a random order."""
    return random.Random(seed).sample(range(n), n)


def write_checkpoint(path, state):
    """Save to a file beside `path`, then rename it: at every moment `path` is whole.  OSError if the disk is full."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(part, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:                    # torch tells of a full disk by a RuntimeError
        part.unlink(missing_ok=True)
        raise OSError(f"could not write {path} (is the disk full?); the one before is intact") from error


def read_checkpoint(path):
    """What a checkpoint holds; ValueError, one line, if it is missing, cut short, of another format, or holds code."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)     # a pickle with code in it is refused
    except Exception as error:                                  # zipfile, pickle and torch each have their own "broken"
        raise ValueError(f"{path} is missing, damaged or no checkpoint ({type(error).__name__})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of format {FORMAT}")
    return state


def prepare(config):
    """The Run of a configuration, without weights yet worth having; ValueError, one line, for files that do not fit."""
    device = accelerator() if config.device == "auto" else config.device
    levels, size = (config.level,) if config.level else TASKS[config.domain].levels, config.eval_problems
    if config.data:
        problems, held_out = load_problems(config.data), load_problems(config.eval_data)
        held_out = [held_out[i] for i in shuffled(len(held_out), "held out")[:size]]
    else:
        make = functools.partial(make_problems, config.domain)
        problems = [p for level in levels for p in make(level, TRAIN_PROBLEMS, config.seed[0])]
        held_out = [p for level in levels for p in make(level, math.ceil(size / len(levels)), 0, held_out=True)][:size]
    if config.model:
        model, tokenizer = load_pretrained(config.model, device, torch.float32)
        template = TEMPLATES["chat" if "<|im_start|>" in tokenizer.special_tokens_set else "base"]
    else:
        model, tokenizer, template = GPT(SIZES[config.size]).to(device), byte_tokenizer(), TEMPLATES["bytes"]
    run = Run(config, model, tokenizer, config.template or template, problems, held_out)
    room = model.config.max_position_embeddings - config.max_new_tokens
    for name in ("problems", "eval_problems"):
        before = getattr(run, name)
        setattr(run, name, [p for p in before if len(run.encode(p.question)) <= room])
        if not getattr(run, name):
            raise ValueError(f"--max_new_tokens {config.max_new_tokens}: the context has room for {room} more at the most")
        if dropped := len(before) - len(getattr(run, name)):
            say(f"{dropped} of {len(before)} {name} have more than {room} tokens and are left out")
    return run


def warm_up(run):
    """Teach a model from random weights the format and the single steps, on worked solutions of short chains.

    The weights are kept under out/warmup/ for each domain, size and seed, so that a second run starts at once.
    """
    c, model, task, order = run.config, run.model, TASKS[run.config.domain], random.Random(run.config.seed[0])
    problems = run.problems if c.data else [p for level, n in task.warmup.items()
                                            for p in make_problems(c.domain, level, n, c.seed[0])]
    eos = list(model.config.eos_token_ids[:1])
    rows = [(run.encode(p.question), run.tokenizer.encode_ordinary(p.solution) + eos) for p in problems]
    recipe = hashlib.sha256(repr((model.config, task, rows)).encode()).hexdigest()[:8]     # another one, other weights
    path = WARMUP_FOLDER / f"{Path(c.data).stem or c.domain}-{c.size}-{c.seed[0]}-{recipe}.pt"
    if path.exists():
        return model.load_state_dict(read_checkpoint(path)["model"])
    torch.manual_seed(c.seed[0])
    model.load_state_dict(GPT(model.config).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), task.warmup_lr, betas=(0.9, 0.95), weight_decay=0.01)
    queue = []
    for step in progress(range(task.warmup_steps), "warm-up"):
        if not queue:       # sorted within a window: rows of a batch have like lengths, little is computed for padding
            window = order.sample(rows, min(len(rows), 32 * WARMUP_BATCH))
            window.sort(key=lambda row: len(row[0]) + len(row[1]))
            queue = [window[i:i + WARMUP_BATCH] for i in range(0, len(window), WARMUP_BATCH)]
            order.shuffle(queue)
        batch = queue.pop()
        T = max(len(prompt) + len(answer) for prompt, answer in batch)
        tokens = torch.tensor([(p + a + [0] * T)[:T] for p, a in batch], device=run.device)             # (B, T)
        places = [(i, t) for i, (p, a) in enumerate(batch) for t in range(len(p), len(p) + len(a))]
        row, column = torch.tensor(places, device=run.device).T                                         # (N,) each
        optimizer.param_groups[0]["lr"] = task.warmup_lr * min((step + 1) / 50, 1 - step / task.warmup_steps)
        with run.autocast():
            logits = token_logits(model, tokens, row, column)                                           # (N, V)
        F.cross_entropy(logits, tokens[row, column]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    WARMUP_FOLDER.mkdir(parents=True, exist_ok=True)
    write_checkpoint(path, {"model": model.state_dict()})


# ---- one step, told as the method is

def reinforce(run):
    """One step: sample, verify, weigh, score, select, update.  Returns the step's metrics, evaluation aside."""
    c, G, started = run.config, run.config.group_size, time.perf_counter()
    rollout, texts, rewards, groups = collect(run)                                              # sample, verify
    row = {"step": run.step + 1, "lr": c.lr, "rollout_s": time.perf_counter() - started, "score_s": 0.0, "update_s": 0.0}
    row |= describe_answers(rollout, texts, rewards)
    row["tokens_per_s"] = int(rollout.answer_mask.sum()) / row["rollout_s"]
    advantages = group_advantages(rewards, scale=c.loss != "dr_grpo").flatten()                 # weigh: (B,)
    with run.autocast():
        reference = score(run.reference, rollout, c.temperature)[0] if run.reference else rollout.logprobs
    slices = []
    for number in range(c.epochs * c.inner_batches):
        started = time.perf_counter()
        chosen = groups.tensor_split(c.inner_batches)[number % c.inner_batches]                 # whole groups
        rows = (chosen[:, None] * G + torch.arange(G, device=run.device)).flatten()             # (rows,)
        batch, A, ref = rollout.take_rows(rows), advantages[rows], reference[rows]
        logprobs, entropy, norm = batch.logprobs, batch.entropy, batch.logit_grad_norm          # (rows, T) each
        if number:      # the first slice still meets the policy that sampled it: that one's record costs nothing
            with run.autocast():
                logprobs, entropy, norm = score(run.model, batch, c.temperature)
        omega = learning_coefficient(logprobs, batch.logprobs, A, c.clip_low, c.clip_high, ref, c.beta)
        scores = token_scores(c.select[0], entropy, omega, norm, run.selector)                  # score: (rows, T)
        keep = 1.0 if c.select[0] == "all" else c.keep
        kept = select_tokens(scores, batch.answer_mask, keep, c.scope, G, c.bottom)             # select: (rows, T)
        row["score_s"] += time.perf_counter() - started
        slices.append(describe_slice(c, batch, logprobs, entropy, A, ref, kept, rewards.flatten()[rows]))
        started = time.perf_counter()
        slices[-1] |= update(run, batch, kept, A, ref)                                          # update
        row["update_s"] += time.perf_counter() - started
    run.step += 1
    row |= {name: mean(s[name] for s in slices) for name in slices[0]}
    watch(run, row)
    return row


def collect(run):
    """Answers to the next problems: a Rollout of B rows, B texts, rewards (P, G), and the groups to train on.

    dapo trains on live groups alone and samples further problems until it has enough, MAX_ROUNDS times at most.
    """
    c, rounds = run.config, []
    while True:
        rounds.append(run.grade(run.next_problems(c.prompts), c.group_size, c.temperature, run.sampler))
        rollouts, texts, rewards = zip(*rounds)
        rewards = torch.cat(rewards)                                                            # (P, G)
        live = (rewards != rewards[:, :1]).any(dim=1).nonzero()[:, 0]                           # (live groups,)
        if c.loss != "dapo" or len(live) >= c.prompts or len(rounds) == MAX_ROUNDS:
            break
    if c.loss == "dapo" and len(live) < c.prompts:
        run.warn("dapo", f"{MAX_ROUNDS} x {c.prompts} prompts gave {len(live)} live groups; training on those")
    groups = live[:c.prompts] if c.loss == "dapo" else torch.arange(len(rewards), device=run.device)
    return Rollout.join(rollouts), sum(texts, []), rewards, groups


def update(run, batch, kept, advantages, ref_logprobs):
    """One optimizer step on the kept tokens (B, T); returns the gradient norm before clipping and the largest ratio.

    Answers without a kept token, and what follows an answer's last one, cost nothing.  FloatingPointError, before any
    weight has moved, if the gradient is not finite.
    """
    c, model, largest = run.config, run.model, torch.zeros((), device=run.device)
    if not kept.any():      # AdamW would move the weights on a zero gradient too, by its momentum
        return {"grad_norm": 0.0, "ratio_max": 1.0}
    divisor = {"grpo": "answer", "dapo": "kept", "dr_grpo": "constant"}[c.loss]
    weights = loss_weights(kept, batch.answer_mask, divisor, c.max_new_tokens)                  # (B, T)
    for rows, T in micro_batches(kept, position_budget(model)):
        r, t = kept[rows, :T].nonzero(as_tuple=True)                                            # (N,) each
        i = rows[r]                                                                             # (N,) rows of the batch
        with run.autocast():
            logits = token_logits(model, batch.tokens[rows, :T], r, t, run.forward) / c.temperature     # (N, V)
        logprobs = -F.cross_entropy(logits, batch.tokens[i, t], reduction="none")               # (N,)
        old, ref = batch.logprobs[i, t], ref_logprobs[i, t]                                     # (N,) each
        # gmts.py takes (B, T): here each token is an answer of its own.
        objective = policy_objective(logprobs[:, None], old[:, None], advantages[i], c.clip_low, c.clip_high,
                                     ref[:, None], c.beta)[:, 0]                                # (N,)
        (weights[i, t] * objective).sum().neg().backward()
        largest = torch.maximum(largest, (logprobs.detach() - old).abs().max())
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip_grad or math.inf).item()
    if not math.isfinite(grad_norm):
        raise FloatingPointError("the gradient is not finite (NaN or inf)")
    run.optimizer.step()
    run.optimizer.zero_grad()
    return {"grad_norm": grad_norm, "ratio_max": largest.exp().item()}


# ---- what a run tells of itself

def describe_answers(rollout, texts, rewards):
    """The metrics of all sampled answers, dead groups included; `commonest` is the share of the commonest token."""
    right, lengths = rewards.flatten() > 0, rollout.answer_mask.sum(dim=1).float()              # (B,) each
    ids = rollout.tokens[rollout.answer_mask]                                                   # (N,)
    return {name: value if isinstance(value, float) else value.item() for name, value in {
        "reward": rewards.mean(), "pass_rate": (rewards > 0).any(dim=1).float().mean(),
        "dead_groups": (rewards == rewards[:, :1]).all(dim=1).float().mean(),
        "truncated": 1 - rollout.finished.float().mean(), "no_answer": mean(extract_answer(t) is None for t in texts) + 0.0,
        "length": lengths.mean(), "length_right": lengths[right].mean(), "length_wrong": lengths[~right].mean(),
        "entropy": rollout.entropy[rollout.answer_mask].mean(), "commonest": ids.bincount().max() / len(ids)}.items()}


def describe_slice(c, batch, logprobs, entropy, advantages, ref_logprobs, kept, rewards):
    """The metrics of one selection; `largest` is the share of the kept tokens that sit in one answer."""
    live, n = batch.answer_mask, max(1, int(kept.sum()))
    by_entropy = select_tokens(entropy, live, c.keep, c.scope, c.group_size)                    # (B, T)
    log_ref = (ref_logprobs - logprobs)[live]                                                   # (N,)
    clipped = learning_coefficient(logprobs, batch.logprobs, advantages, c.clip_low, c.clip_high) == 0
    clipped = clipped & live & (advantages != 0)[:, None]                                       # (B, T)
    return {"entropy_kept": entropy[kept].sum().item() / n, "kept_share": int(kept.sum()) / max(1, int(live.sum())),
            "overlap_entropy": int((kept & by_entropy).sum()) / n, "kept_right": int(kept[rewards > 0].sum()) / n,
            "clip_share": int(clipped.sum()) / max(1, int(live.sum())), "largest": int(kept.sum(1).max()) / n if len(kept) else 0,
            "kl": (torch.expm1(log_ref) - log_ref).mean().item() if c.beta else math.nan}


def watch(run, row):
    """Warn, once each, of learning that goes wrong, and say what to try."""
    for name, wrong, text in (
        ("dead", row["dead_groups"] == 1, "all groups are dead, each all right or all wrong: try another --level"),
        ("truncated", row["truncated"] == 1, "no answer ends within --max_new_tokens: raise it; if they grew, lower --lr"),
        ("no_answer", row["no_answer"] == 1, "no answer holds a result like '#### 7': see samples.txt, try a --template"),
        ("entropy", row["entropy"] < 0.005, "entropy is nearly 0, answers no longer differ: lower --lr"),
        ("stuck", row["commonest"] > 0.8, "four tokens in five are the same: the policy has collapsed; lower --lr"),
        ("largest", row["largest"] > 0.5, "one answer has more than half of the kept tokens: try --scope group"),
        ("ratio", row["step"] == 1 and row["clip_share"] == 0 and row["ratio_max"] > 1.5,
         "the first ratio is far from 1: is the policy that sampled the one that learns?"),
    ):
        if wrong:
            run.warn(name, text)


def evaluate(run):
    """Held-out accuracy: greedy, avg@n, unbiased pass@k of n = --eval_samples; the training's random state is left alone.

    Returns the three cells of metrics.csv, and the graded greedy answers as lines of text.
    """
    n, graded, right, generator = run.config.eval_samples, [], [], torch.Generator(run.device).manual_seed(0)
    for samples, temperature in ((1, 0.0), (n, run.config.temperature)):
        size = max(1, EVAL_ROWS // samples)
        for problems in (run.eval_problems[i:i + size] for i in range(0, len(run.eval_problems), size)):
            _, texts, rewards = run.grade(problems, samples, temperature, generator)
            if temperature:
                right += rewards.sum(dim=1).tolist()
            else:
                graded += [(r, f"{'right' if r else 'WRONG'} {p.question!r} -> {text!r}, gold {p.answer!r}")
                           for r, p, text in zip(rewards.flatten().tolist(), problems, texts)]
    cells = mean(r for r, _ in graded), mean(right) / n, mean(pass_at_k(n, int(r), min(8, n)) for r in right)
    return dict(zip(columns(run.config)[-3:], cells)), [line for _, line in graded]


def pass_at_k(n, right, k):
    """The chance that one of k answers is right, unbiased from n (arXiv 2107.03374, eq. 1).  ValueError if k > n."""
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {n}")
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def columns(c):
    """The header of metrics.csv."""
    return [*METRICS, "eval_greedy", f"eval_avg@{c.eval_samples}", f"eval_pass@{min(8, c.eval_samples)}"]


def log(run, row, evaluation=None):
    """Write a step's row; after an evaluation also the samples and the checkpoint."""
    if evaluation:
        row |= evaluation[0]
        say(f"step {run.step:4}  " + "  ".join(f"{name[5:]} {value:.3f}" for name, value in evaluation[0].items()))
        some = evaluation[1][::max(1, len(evaluation[1]) // 12)]
        append(run.folder / "samples.txt", "\n".join([f"--- step {run.step}", *some]))
    cells = (row.get(name, math.nan) for name in columns(run.config))
    append(run.folder / "metrics.csv", ",".join("" if math.isnan(cell) else f"{cell:.6g}" for cell in cells))
    if evaluation:
        run.save()


def append(path, text):
    """Add lines to a text file; UTF-8 whatever the locale."""
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write(text + "\n")


def read_metrics(folder):
    """metrics.csv as dicts of floats; an empty cell, such as the length of no answers, is left out."""
    with open(Path(folder) / "metrics.csv", encoding="utf-8", newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def progress(steps, name):
    """A progress bar on a terminal; nothing in a file or a pipe, where carriage returns have no place."""
    return tqdm(steps, name, disable=not sys.stderr.isatty(), dynamic_ncols=True)


# ---- runs, comparisons, the command line

def train(config):
    """One run, from its start or, with config.resume, its checkpoint, to its last step; returns its metrics.csv."""
    run = prepare(config)
    if config.resume:
        for name, length in run.restore().items():
            os.truncate(run.folder / name, length)          # what came after the checkpoint will come again
    else:
        if not config.model:
            warm_up(run)
        run.reference = frozen(run.model) if config.beta else None
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "config.json").write_text(json.dumps(asdict(config), indent=1), encoding="utf-8")
        append(run.folder / "metrics.csv", ",".join(columns(config)))
        log(run, {"step": 0}, evaluate(run))
    stop = []       # Ctrl-C takes effect after the step, where the state is whole; a second one at once
    signal.signal(signal.SIGINT, lambda *_: (stop.append(1), signal.signal(signal.SIGINT, signal.default_int_handler)))
    for _ in (bar := progress(range(run.step, config.steps), config.select[0])):
        try:
            row = reinforce(run)
        except FloatingPointError as error:
            raise FloatingPointError(f"step {run.step + 1}: {error}; {run.folder} holds the last good state") from error
        log(run, row, evaluate(run) if run.step % config.eval_every == 0 or run.step == config.steps else None)
        bar.set_postfix_str(f"reward {row['reward']:.2f} entropy {row['entropy']:.3f} {row['tokens_per_s']:.0f} tok/s")
        if stop:
            run.save()
            raise KeyboardInterrupt(f"step {run.step} is saved; python train.py --resume --out {run.folder} goes on")
    return read_metrics(run.folder)


def load_run(folder, device="cpu"):
    """The Run of a folder, with the weights of its checkpoint; ValueError, one line, if there is none."""
    saved = read_checkpoint(Path(folder) / "checkpoint.pt")["config"]
    run = prepare(Config(**saved | {"out": str(folder), "device": device}))
    run.restore()
    return run


def summarize(config, rows):
    """The line of summary.csv for one run; `area` is its mean greedy accuracy over the steps."""
    curve = [(row["step"], row["eval_greedy"]) for row in rows if "eval_greedy" in row]
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in zip(curve, curve[1:])) / curve[-1][0]
    return {"selection": config.select[0], "seed": config.seed[0], "start_greedy": curve[0][1],
            "final_greedy": curve[-1][1], "best_greedy": max(y for _, y in curve),
            **{name[5:]: rows[-1][name] for name in columns(config)[-2:]}, "area": area}


def compare(config):
    """Every selection with every seed, in folders of their own; warm-up and problem order of a seed are shared."""
    folder, lines = Path(config.out), []
    for seed in config.seed:
        for name in config.select:
            out = folder / f"{name}-{seed}"
            say(f"{name}, seed {seed}")
            single = replace(config, select=(name,), seed=(seed,), out=str(out), resume=(out / "checkpoint.pt").exists())
            lines.append(summarize(single, train(single)))
    with open(folder / "summary.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    numbers = list(lines[0])[2:]
    say(f"\n{'mean +- std':12}" + "".join(f"{number:>17}" for number in numbers))
    for name in config.select:
        cells = [[line[number] for line in lines if line["selection"] == name] for number in numbers]
        say(f"{name:12}" + "".join(f"{mean(c):.3f} +- {stdev(c) if c[1:] else math.nan:.3f}".rjust(17) for c in cells))


def parse(arguments):
    """The Config of a command line, or with --resume the saved one; ValueError, one line, for what cannot work."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)
    for f in fields(Config):
        kind = type(f.default[0] if f.type is tuple else f.default)
        how = {"action": "store_true"} if kind is bool else {"type": kind, "nargs": "+" if f.type is tuple else None}
        text = f"{f.metadata['help']} ({f.metadata['allowed']}; default {f.default})"
        parser.add_argument(f"--{f.name}", help=text.replace("%", "%%"), **how)
    parser.error = lambda message: (_ for _ in ()).throw(ValueError(message.removeprefix("argument ")))
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(parser.parse_args(arguments)).items()}
    config = Config(**given)
    config.check()
    if not config.out:
        name = f"out/{Path(config.model).name or config.size}-{Path(config.data).stem or config.domain}"
        last = max((i for i in range(1, 1000) if Path(f"{name}-{i}").exists()), default=0)
        config.out = f"{name}-{last if config.resume else last + 1}"
    folder, may_change = Path(config.out), {k: given[k] for k in ("steps", "device") if k in given}
    if not config.resume:
        if folder.exists() and (folder.is_file() or any(folder.iterdir())):
            raise ValueError(f"--out {folder}: something is there already; --resume goes on with it")
        return config
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        saved = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"--resume --out {folder}: no run is there ({type(error).__name__})") from error
    for name in given.keys() - may_change.keys() - {"resume", "out"}:
        if given[name] != getattr(saved, name):
            raise ValueError(f"--{name} {given[name]}: --resume goes on with {getattr(saved, name)}, as the run began")
    return replace(saved, out=config.out, resume=True, **may_change)


def main(arguments=None):
    """Run a command line; the exit code is 0, 1 if the run broke, 2 for bad input, 130 after Ctrl-C."""
    sys.stdout.reconfigure(errors="backslashreplace")           # a terminal that cannot show a character shows its code
    try:
        config = parse(arguments)
        say(f"writing to {config.out}")
        if len(config.select) * len(config.seed) > 1:
            compare(config)
            return 0
        rows = train(config)
        say(f"\n{'held-out problems':20}{'before':>8}{'after':>8}")
        for name in columns(config)[-3:]:
            say(f"{name[5:]:20}{rows[0][name]:8.3f}{rows[-1][name]:8.3f}")
        return 0
    except (ValueError, OSError, FloatingPointError, KeyboardInterrupt) as error:
        print(f"train.py: {error or 'interrupted before the first step'}", file=sys.stderr)
        return {ValueError: 2, KeyboardInterrupt: 130}.get(type(error), 1)


if __name__ == "__main__":
    sys.exit(main())

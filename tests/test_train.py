"""train.py: gradients against a plain computation, learning, resuming after every kind of end, and bad input."""
import csv
import io
import json
import math
import os
import pickle
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import gmts
import rollout as rollout_module
import tiny_run
import train
from model import GPT, GPTConfig
from rollout import generate
from train import Config, Run
from verify import Problem

ROOT = Path(__file__).resolve().parents[1]
TIMES = {"tokens_per_s", "rollout_s", "score_s", "update_s"}


@pytest.fixture(autouse=True)
def interrupts_end_pytest_again():
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """train.py made tiny, in an empty folder; returns a function that makes a Config of it."""
    tiny_run.shrink(monkeypatch.setattr, monkeypatch.setitem)
    monkeypatch.chdir(tmp_path)
    values = dict(zip((flag[2:] for flag in tiny_run.FLAGS[::2]), tiny_run.FLAGS[1::2]))
    return lambda **flags: Config(**{**values, **flags})


def cli(*arguments):
    """The exit code of `python train.py ARGUMENTS`, here."""
    return train.main([*tiny_run.FLAGS, *map(str, arguments)])


class Letters:
    """A tokenizer of eight letters; h ends an answer."""
    special_tokens_set = ()

    def encode(self, text, allowed_special=()):
        return ["abcdefgh".index(letter) for letter in text]

    encode_ordinary = encode

    def decode(self, ids):
        return "".join("abcdefgh"[i] for i in ids)


LETTERS = GPTConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=8, vocab_size=8, embedding_rows=8, max_position_embeddings=32,
                    eos_token_ids=(7,))


def letters_run(weights=0, **flags):
    """A Run that never saw a file: repeat the one letter of the question."""
    torch.manual_seed(weights)
    config = Config(**{"prompts": 6, "group_size": 8, "max_new_tokens": 4, "eval_problems": 7, "eval_samples": 4, **flags})
    run = Run(config, GPT(LETTERS), Letters(), "{question}")
    run.problems = run.eval_problems = [Problem(letter, letter, letter) for letter in "abcdefg"]
    if config.beta:
        run.reference.load_state_dict(run.model.state_dict())
    return run


# ----------------------------------------------------------------------------------------------------------- the update

class Captured:
    """An optimizer that keeps the gradient instead of taking the step."""
    def __init__(self, model):
        self.model, self.grad = model, None

    def step(self):
        self.grad = torch.cat([p.grad.flatten() for p in self.model.parameters()]).clone()

    def zero_grad(self):
        self.model.zero_grad()


def sampled(run, moved=0.05):
    """A Rollout of the run's model, which has moved since, advantages, and a reference policy's log-probs."""
    prompts = [[1, 2], [3], [4, 5, 6]]
    batch = generate(run.model, prompts, 4, 8, (7,), run.config.temperature, 1.0, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(torch.randn_like(p) * moved * p.std())
    A = torch.randn(12)
    return batch, A, batch.logprobs + 0.3 * torch.randn_like(batch.logprobs)


def plain_gradient(run, batch, kept, A, ref):
    """The gradient as the formulas have it, from one forward of everything."""
    c = run.config
    logits = run.model.logits(run.model(batch.tokens)).double() / c.temperature
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
    logprobs = torch.cat([torch.zeros(len(A), 1), logprobs], 1)
    ratio, a = (logprobs - batch.logprobs).exp(), A[:, None]
    objective = torch.minimum(ratio * a, ratio.clamp(1 - c.clip_low, 1 + c.clip_high) * a)
    objective = objective - c.beta * ((ref - logprobs).exp() - (ref - logprobs) - 1)
    lengths = batch.answer_mask.sum(1, keepdim=True)
    divisor = {"grpo": len(A) * lengths, "dapo": kept.sum(), "dr_grpo": torch.tensor(len(A) * c.max_new_tokens)}[c.loss]
    run.model.zero_grad()
    (-(objective / divisor)[kept].sum()).backward()
    grad = torch.cat([p.grad.flatten() for p in run.model.parameters()])
    run.model.zero_grad()
    return grad


@pytest.mark.parametrize("loss, beta", [("grpo", 0.0), ("grpo", 0.3), ("dapo", 0.0), ("dr_grpo", 0.0), ("dr_grpo", 0.3)])
@pytest.mark.parametrize("keep", [0.1, 0.5, 1.0])
def test_gradients_do_not_depend_on_memory_or_order(monkeypatch, loss, beta, keep):
    run = letters_run(loss=loss, beta=beta, keep=keep, temperature=0.8, max_new_tokens=8, clip_grad=0, clip_low=0.02,
                      clip_high=0.03)
    batch, A, ref = sampled(run)
    kept = gmts.select_tokens(batch.entropy * A[:, None].abs(), batch.answer_mask, keep)
    expected = plain_gradient(run, batch, kept, A, ref)
    run.optimizer = Captured(run.model)
    for budget, order in ((10 ** 6, torch.arange(12)), (1, torch.arange(12)), (30, torch.randperm(12))):
        monkeypatch.setattr(train, "budgets", lambda model: (8, budget, ""))
        result = train.update(run, batch.take_rows(order), kept[order], A[order], ref[order])
        torch.testing.assert_close(run.optimizer.grad, expected, atol=1e-6, rtol=1e-4)
        assert result["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)
        assert result["ratio_max"] > 1.001
    assert all(p.grad is None for p in run.model.parameters())


def test_the_norm_is_that_before_clipping():
    run = letters_run(clip_grad=1e-3, max_new_tokens=8)
    batch, A, ref = sampled(run)
    run.optimizer = Captured(run.model)
    norm = train.update(run, batch, batch.answer_mask, A, ref)["grad_norm"]
    assert norm > 1e-2 and float(run.optimizer.grad.norm()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("flags", [{}, {"select": ("all",)}, {"temperature": 0.6}, {"loss": "dr_grpo"}, {"beta": 0.1}])
def test_the_first_ratio_is_one(monkeypatch, flags):
    monkeypatch.setattr(train, "reward", tiny_run.coin)
    row = train.reinforce(letters_run(**flags))
    assert abs(row["first_ratio"] - 1) < 1e-4 and row["clip_share"] == 0 and row["grad_norm"] > 0
    assert row["kept_share"] == pytest.approx(1.0 if "select" in flags else 0.2, abs=0.02)


def test_later_slices_and_passes_meet_a_moved_policy(monkeypatch):
    monkeypatch.setattr(train, "reward", tiny_run.coin)
    update, ratios = train.update, []

    def watched(*args):
        ratios.append(update(*args))
        return ratios[-1]

    monkeypatch.setattr(train, "update", watched)
    row = train.reinforce(letters_run(epochs=2, inner_batches=3, lr=1e-2))
    assert row["first_ratio"] - 1 < 1e-4 < row["ratio_max"] - 1
    assert row["ratio_max"] == max(one["ratio_max"] for one in ratios) and len(ratios) == 6


def test_no_live_token_no_optimizer_step(monkeypatch):
    monkeypatch.setattr(train, "reward", tiny_run.coin)
    run = letters_run(lr=1e-2)
    train.reinforce(run)                                         # AdamW has momentum now
    before = [p.clone() for p in run.model.parameters()]
    monkeypatch.setattr(train, "reward", lambda text, gold: 1.0)
    row = train.reinforce(run)
    assert all(map(torch.equal, before, run.model.parameters()))
    assert row["grad_norm"] == 0 and row["dead_groups"] == 1 and row["kept_share"] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(bad):
    run = letters_run(max_new_tokens=8)
    batch, A, ref = sampled(run)
    A[3] = bad
    before = [p.clone() for p in run.model.parameters()]
    with pytest.raises(FloatingPointError, match="gradient is not finite"):
        train.update(run, batch, batch.answer_mask, A, ref)
    assert all(map(torch.equal, before, run.model.parameters()))


def test_bfloat16_keeps_float32_weights(monkeypatch):
    monkeypatch.setattr(train, "reward", tiny_run.coin)
    run = letters_run(dtype="bfloat16", lr=1e-6)
    before = [p.clone() for p in run.model.parameters()]
    row = train.reinforce(run)
    assert row["grad_norm"] > 0 and abs(row["first_ratio"] - 1) < 0.2
    for old, new in zip(before, run.model.parameters()):
        assert new.dtype == torch.float32 and not torch.equal(old, new)
    assert all(value.dtype == torch.float32 for state in run.optimizer.state.values() for value in state.values())


# ------------------------------------------------------------------------------------------------------------- learning

def one_letter(text, gold):
    return float(text.startswith(gold))


@pytest.mark.parametrize("flags", [{"select": (name,)} for name in ("all", "random", "entropy", "gmts", "exact")] + [
    {"loss": "dapo"}, {"loss": "dr_grpo"}, {"scope": "group"}, {"scope": "answer", "keep": 0.5},
    {"beta": 0.01, "epochs": 2, "inner_batches": 2}], ids=str)
def test_it_learns(monkeypatch, flags):
    monkeypatch.setattr(train, "reward", one_letter)
    monkeypatch.setattr(train, "say", lambda text: None)
    run = letters_run(**{"lr": 1e-2, "keep": 0.3, "max_new_tokens": 2, "prompts": 8, **flags})
    before = train.evaluate(run)["eval_greedy"]
    for _ in range(50):
        train.reinforce(run)
    after = train.evaluate(run)["eval_greedy"]
    assert before < 0.3 and after > 0.85, (before, after)


def test_the_bottom_selection_keeps_the_rest(monkeypatch):
    monkeypatch.setattr(train, "reward", tiny_run.coin)
    rows = [train.reinforce(letters_run(bottom=bottom, select=("entropy",), keep=0.5)) for bottom in (False, True)]
    assert rows[0]["entropy_kept"] > rows[1]["entropy_kept"] and rows[0]["overlap_entropy"] == 1
    assert rows[1]["overlap_entropy"] < 0.1


# ------------------------------------------------------------------------------------------------------ samples and order

def test_dapo_samples_again_but_not_for_ever(monkeypatch):
    calls = []
    monkeypatch.setattr(train, "reward", lambda text, gold: calls.append(gold) or 0.0)
    run = letters_run(loss="dapo")
    rollout, texts, rewards, groups = train.collect(run)
    assert len(calls) == train.MAX_ROUNDS * 48 == len(texts) == len(rollout.tokens) and len(groups) == 0
    assert rewards.shape == (30, 8) and train.reinforce(run)["groups"] == 0
    monkeypatch.setattr(train, "reward", lambda text, gold: float(gold in "abc" and len(text) % 2))
    rollout, texts, rewards, groups = train.collect(letters_run(loss="dapo"))
    live = (rewards != rewards[:, :1]).any(dim=1)
    assert len(groups) <= 6 and live[groups].all() and len(rewards) > 6


def test_problems_come_in_another_order_each_pass():
    run, again, other = letters_run(), letters_run(weights=1), letters_run(seed=(5,))
    passes = [[p.question for p in run.next_problems(7)] for _ in range(3)]
    assert all(sorted(p) == list("abcdefg") for p in passes) and passes[0] != passes[1] != passes[2]
    assert [p.question for n in (3, 10, 8) for p in again.next_problems(n)] == sum(passes, [])
    assert [p.question for p in other.next_problems(7)] != passes[0]


def test_an_evaluation_leaves_the_random_state_alone():
    run = letters_run()
    states = lambda: (torch.get_rng_state(), run.sampler.get_state(), run.selector.get_state())
    before, python = states(), random.getstate()
    cells = train.evaluate(run)
    assert all(map(torch.equal, before, states())) and random.getstate() == python and run.position == 0
    assert cells == train.evaluate(run) and list(cells) == ["eval_greedy", "eval_avg@4", "eval_pass@4"]


def test_grading_in_parts_is_grading_at_once(monkeypatch):
    run = letters_run()
    whole = run.grade(run.problems, 2, 0.0, None)
    monkeypatch.setattr(rollout_module, "MAX_ROWS", 5)
    parts = run.grade(run.problems, 2, 0.0, None)
    assert whole[1] == parts[1] and torch.equal(whole[2], parts[2]) and whole[2].shape == (7, 2)


def test_the_prompt_and_special_tokens(tiny):
    run = train.prepare(tiny())
    eos, question, answer = (run.tokenizer.encode(f"<|{name}|>", allowed_special="all") for name in ("eos", "question", "answer"))
    ids = run.encode("1+1 <|eos|><|answer|>?")
    assert ids[:1] == question and ids[-1:] == answer and len(ids) == 2 + len("1+1 <|eos|><|answer|>?")
    assert eos[0] not in ids and ids.count(answer[0]) == 1


def test_evaluation_counts_every_problem(tiny, monkeypatch):
    run = train.prepare(tiny(eval_problems=9, eval_samples=16))
    assert len(run.eval_problems) == 9 and not {p.question for p in run.problems} & {p.question for p in run.eval_problems}
    monkeypatch.setattr(train, "reward", lambda text, gold: 0.0)
    assert list(train.evaluate(run).values()) == [0, 0, 0]
    monkeypatch.setattr(train, "reward", lambda text, gold: 1.0)
    assert train.evaluate(run) == {"eval_greedy": 1, "eval_avg@16": 1, "eval_pass@8": 1}
    asked = iter(range(9 * 17))             # answers that are cut off or say nothing count like all others
    monkeypatch.setattr(train, "reward", lambda text, gold: float(next(asked) in (4, 9 + 2 * 16)))
    values = train.evaluate(run)
    assert values == pytest.approx({"eval_greedy": 1 / 9, "eval_avg@16": 1 / 144, "eval_pass@8": 0.5 / 9})


# ------------------------------------------------------------------------------------------------- warnings and collapse

def healthy():
    return {"step": 1, "dead_groups": 0.2, "groups": 6, "truncated": 0.1, "no_answer": 0.1, "entropy": 0.5, "commonest": 0.2,
            "largest": 0.1, "first_ratio": 1.00001}


@pytest.mark.parametrize("change, word", [
    ({"dead_groups": 1.0}, "dead"), ({"groups": 2}, "dapo"), ({"truncated": 1.0}, "--max_new_tokens"),
    ({"no_answer": 1}, "samples.txt"), ({"entropy": 0.001}, "entropy"), ({"commonest": 0.9}, "collapsed"),
    ({"largest": 0.6}, "--scope"), ({"first_ratio": 3.0}, "ratio")])
def test_each_warning_comes_once(capsys, change, word):
    run = letters_run()
    train.watch(run, healthy())
    assert capsys.readouterr().out == ""
    for _ in range(3):
        train.watch(run, {**healthy(), **change})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("warning, step") and word in lines[0]


def test_collapse_is_seen_in_a_run(monkeypatch, capsys):
    run = letters_run()
    # a policy that says one letter for ever
    monkeypatch.setattr(run.model, "logits", lambda hidden: 100.0 * (torch.arange(8) == 3).expand(len(hidden), 8))
    train.reinforce(run)
    said = capsys.readouterr().out
    assert all(word in said for word in ("dead", "--max_new_tokens", "entropy", "collapsed"))


@pytest.mark.parametrize("where", ["weights", "gradient"])
def test_nan_stops_the_run_and_keeps_the_checkpoint(tiny, monkeypatch, capsys, where):
    real = train.update

    def update(run, *arguments):
        result = real(run, *arguments)
        if run.step + 1 == 7 and where == "weights":
            with torch.no_grad():
                run.model.embed.weight[5, 2] = math.nan
        if run.step + 1 == 8:
            raise FloatingPointError("the gradient is not finite (NaN or inf)")
        return result
    monkeypatch.setattr(train, "update", update)
    assert cli("--steps", 10, "--out", "run") == 1
    error = capsys.readouterr().err
    assert error.startswith("train.py: step 8: ") and error.count("\n") == 1 and "last good state" in error
    assert train.load_run("run").step == 5


# ----------------------------------------------------------------------------------------------------- what a run writes

def without_times(rows):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def read_csv(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def everything(folder):
    """All that a run leaves, apart from how long it took and what it was called."""
    state = train.read_checkpoint(folder / "checkpoint.pt")
    state["rows"] = without_times(state["rows"])
    for name in ("out", "resume", "steps"):
        del state["config"][name]
    return state, without_times(read_csv(folder / "metrics.csv")), (folder / "samples.txt").read_bytes()


def same(a, b):
    """Whether two nests of dicts, lists, tensors and numbers are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_files_of_a_run(tiny, tmp_path, capsys):
    assert cli("--steps", 4, "--eval_every", 2, "--out", "run") == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"config.json", "metrics.csv", "samples.txt", "checkpoint.pt"}
    rows = read_csv("run/metrics.csv")
    assert [row["step"] for row in rows] == list("01234")
    assert list(rows[0]) == (
        "step reward pass_rate dead_groups truncated no_answer length length_right length_wrong entropy entropy_kept "
        "kept_share overlap_entropy kept_right ratio_max clip_share kl grad_norm lr tokens_per_s rollout_s score_s update_s "
        "eval_greedy eval_avg@2 eval_pass@2").split()
    assert [bool(row["eval_greedy"]) for row in rows] == [True, False, True, False, True]
    assert all(row["entropy"] and row["grad_norm"] and row["lr"] == "0.01" for row in rows[1:])
    assert [line for line in Path("run/samples.txt").read_text("utf-8").splitlines() if line.startswith("---")] == [
        "--- step 0", "--- step 2", "--- step 4"]
    out = capsys.readouterr().out
    assert "before" in out and "\r" not in out and not list(tmp_path.rglob("*.tmp"))
    run = train.load_run("run")
    assert run.step == 4 and same(run.model.state_dict(), train.read_checkpoint(Path("run/checkpoint.pt"))["model"])
    assert json.loads(Path("run/config.json").read_text("utf-8"))["keep"] == 0.2


@pytest.mark.parametrize("flags", [[], ["--beta", "0.1", "--select", "random", "--inner_batches", "2", "--epochs", "2"],
                                   ["--loss", "dapo"]], ids=str)
def test_ten_steps_are_five_and_five(tiny, tmp_path, flags):
    assert cli("--steps", 10, "--out", "whole", *flags) == 0
    assert cli("--steps", 5, "--out", "parts", *flags) == 0
    assert cli("--steps", 10, "--out", "parts", "--resume") == 0
    a, b = everything(tmp_path / "whole"), everything(tmp_path / "parts")
    assert same(a, b) and a[0]["step"] == 10
    assert cli("--resume", "--out", "parts") == 0                # nothing is left to do, and the steps are remembered
    assert same(a, everything(tmp_path / "parts"))


def test_resume_without_a_name_takes_the_newest(tiny, tmp_path, capsys):
    for _ in range(2):
        assert cli("--steps", 1) == 0
    os.utime("out/tiny-math-1/config.json", (1, 1))
    assert cli("--steps", 3, "--resume") == 0
    assert [len(read_csv(f"out/tiny-math-{i}/metrics.csv")) for i in (1, 2)] == [2, 4]


def test_a_comparison_shares_warm_up_and_order(tiny, tmp_path, capsys, monkeypatch):
    warmed, asked = [], {}
    real = Run.next_problems
    monkeypatch.setattr(train, "write_whole", lambda path, content, real=train.write_whole: (
        warmed.append(path.name) if "warmup" in str(path) else None, real(path, content))[1])

    def next_problems(run, n):
        problems = real(run, n)
        asked.setdefault(run.config.select + run.config.seed, []).extend(p.question for p in problems)
        return problems
    monkeypatch.setattr(Run, "next_problems", next_problems)
    flags = ["--select", "gmts", "random", "all", "--seed", "0", "1", "--eval_every", "2"]
    assert cli("--steps", 3, "--out", "cmp", *flags) == 0
    assert len(warmed) == 2
    for seed in (0, 1):
        assert asked["gmts", seed] == asked["random", seed] == asked["all", seed]
        first = [read_csv(f"cmp/{name}-{seed}/metrics.csv")[0] for name in ("gmts", "random", "all")]
        assert first[0] == first[1] == first[2]
    assert asked["gmts", 0] != asked["gmts", 1]
    table = read_csv("cmp/summary.csv")
    assert [(row["selection"], row["seed"]) for row in table] == [(s, n) for s in ("gmts", "random", "all") for n in "01"]
    assert set(table[0]) == {"selection", "seed", "start", "best", "area", "greedy", "avg@2", "pass@2"}
    out = capsys.readouterr().out
    assert out.count(" +- ") == 12 and all(f"\n{name} " in out for name in ("before", "gmts", "random", "all"))
    assert cli("--steps", 4, "--resume", "--out", "cmp", "--eval_every", 2) == 0    # every run of it goes on
    assert len(read_csv("cmp/all-1/metrics.csv")) == 5


def test_the_area_under_a_curve():
    rows = [{"step": 0, "eval_greedy": 0.2}, {"step": 10, "eval_greedy": 0.6},
            {"step": 40, "eval_greedy": 0.5, "eval_avg@8": 0.4, "eval_pass@8": 0.9}]
    assert train.summarize(Config(), rows) == pytest.approx({
        "selection": "gmts", "seed": 0, "start": 0.2, "best": 0.6, "greedy": 0.5, "avg@8": 0.4, "pass@8": 0.9,
        "area": (0.4 * 10 + 0.55 * 30) / 40})


@pytest.mark.parametrize("stopped, steps", [(7, 7), (7, 6), (3, 3), (3, 2)])
def test_a_run_that_is_resumed_with_no_step_left_ends_with_its_last_evaluation(tiny, monkeypatch, capsys, stopped, steps):
    def interrupted(run):
        if run.step + 1 == stopped:
            signal.raise_signal(signal.SIGINT)
        return reinforce(run)
    reinforce = train.reinforce
    monkeypatch.setattr(train, "reinforce", interrupted)
    assert cli("--eval_every", 5, "--steps", 20, "--out", "run") == 130
    assert train.main(["--resume", "--out", "run", "--steps", str(steps)]) == 0, capsys.readouterr().err
    (line,) = csv.DictReader(Path("run/summary.csv").read_text().splitlines())
    rows = list(csv.DictReader(Path("run/metrics.csv").read_text().splitlines()))
    assert len(rows) == stopped + 1 and line["greedy"] == rows[5 if stopped == 7 else 0]["eval_greedy"]


def test_a_warm_up_in_bfloat16_is_not_taken_for_one_in_float32(tiny):
    for dtype in ("float32", "bfloat16", "float32"):
        train.warm_up(train.prepare(tiny(dtype=dtype)))
    assert len(list(Path("out/warmup").iterdir())) == 2


def test_files_of_problems(tiny, tmp_path, capsys):
    lines = [json.dumps({"question": f"{i}+{i}?", "answer": f"so\n#### {2 * i}"}) for i in range(12)]
    lines.append(json.dumps({"question": "very " * 60 + "long?", "answer": "#### 1"}))
    Path("train.jsonl").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    Path("test.jsonl").write_text("\n".join(lines[:5]))
    assert cli("--steps", 1, "--data", "train.jsonl", "--eval_data", "test.jsonl", "--eval_problems", 3) == 0
    assert "1 problems do not fit the context" in capsys.readouterr().out and Path("out/tiny-train-1/metrics.csv").exists()


def test_pictures_are_optional(tiny, capsys, monkeypatch):
    for name in ("matplotlib", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "assets.pictures")
    assert cli("--steps", 1, "--out", "run") == 0
    assert capsys.readouterr().out.count("pip install matplotlib") == 1 and not Path("run/curves.png").exists()
    monkeypatch.delitem(sys.modules, "assets.pictures")          # it was imported without matplotlib


def test_a_run_of_another_kind_of_device_can_be_loaded_and_go_on(tiny):
    assert cli("--steps", 1, "--out", "run") == 0
    path = Path("run/checkpoint.pt")
    state = train.read_checkpoint(path) | {"sampler": torch.zeros(16, dtype=torch.uint8)}      # so small is a GPU's
    torch.save(state, path)
    run = train.load_run("run")
    assert torch.equal(run.model.embed.weight, state["model"]["embed.weight"])
    assert cli("--resume", "--steps", 2, "--out", "run") == 0


def test_an_interrupt_after_a_run_is_nobody_elses(tiny):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert cli("--steps", 1, "--out", "run") == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_problems_whose_solutions_are_too_long_for_a_warm_up_are_counted_and_left_out(tiny, capsys):
    Path("train.jsonl").write_text("".join(json.dumps({"question": f"{i}+1?", "answer": f"{'x' * 75 * i} #### {i + 1}"})
                                           + "\n" for i in range(4)))
    Path("held_out.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    assert cli("--data", "train.jsonl", "--eval_data", "held_out.jsonl", "--max_new_tokens", 20, "--steps", 1) == 0
    assert "2 problems do not fit the context" in capsys.readouterr().out


def test_pictures(tiny, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.delitem(sys.modules, "assets.pictures")
    assert cli("--steps", 2, "--out", "run") == 0
    assert Path("run/curves.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------------------- bad input

BAD = [  # arguments, what the line has to say
    (["--keep", 0], "--keep 0: "), (["--keep", -1], "--keep -1: "), (["--keep", "nan"], "--keep nan: "),
    (["--keep", 1.5], "--keep 1.5: "), (["--keep", "many"], "--keep many: "), (["--keep"], "--keep: "),
    (["--prompts", 0], "--prompts 0: "), (["--prompts", 1.5], "--prompts 1.5: "), (["--prompts", "4x"], "--prompts 4x: "),
    (["--group_size", 1], "--group_size 1: "), (["--domain", "chess"], "--domain chess: allowed is math, code, logic"),
    (["--size", "huge"], "--size huge: "), (["--loss", "ppo"], "--loss ppo: "), (["--scope", "token"], "--scope token: "),
    (["--select", "gmts", "best"], "best"), (["--select"], "--select: "), (["--seed", -1], "-1"), (["--seed", "x"], "x"),
    (["--seed", 0, 0], "once"), (["--select", "gmts", "all", "gmts"], "once"),
    (["--steps", 0], "--steps 0: "), (["--epochs", 0], "--epochs 0: "), (["--inner_batches", 3], "--inner_batches 3: "),
    (["--lr", 0], "--lr 0: "), (["--lr", "inf"], "--lr inf: "), (["--lr", "-1e-3"], "--lr"), (["--beta", -0.1], "--beta"),
    (["--beta", "inf"], "--beta inf: "), (["--seed", 2 ** 64], "from 0 to 4294967295"),
    (["--data", ".", "--eval_data", "fine.jsonl"], "--data .: "), (["--model", "fine.jsonl"], "--model fine.jsonl: "),
    (["--beta", "nan"], "--beta nan: "), (["--clip_low", 1.5], "--clip_low 1.5: "), (["--clip_high", -1], "--clip_high -1: "),
    (["--temperature", 0], "--temperature 0: "), (["--top_p", 0], "--top_p 0: "), (["--top_p", 1.01], "--top_p 1.01: "),
    (["--max_new_tokens", 0], "--max_new_tokens 0: "), (["--max_new_tokens", 160], "--max_new_tokens 160: "),
    (["--max_new_tokens", 10 ** 9], "--max_new_tokens 1000000000: "), (["--level", 9], "--level 9: "),
    (["--level", -1], "--level -1: "), (["--eval_every", 0], "--eval_every 0: "),
    (["--eval_samples", 0], "--eval_samples 0: "), (["--eval_problems", 0], "--eval_problems 0: "),
    (["--device", "tpu"], "--device tpu: allowed is auto, cpu"), (["--dtype", "float16"], "--dtype float16: "),
    (["--loss", "dapo", "--epochs", 2], "--epochs 2: "), (["--loss", "dapo", "--beta", 0.1], "--beta 0.1: "),
    (["--template", "no hole"], "--template no hole: "), (["--template", "{question}{question}"], "--template"),
    (["--data", "missing.jsonl"], "--data missing.jsonl: "), (["--data", "fine.jsonl"], "--data fine.jsonl: "),
    (["--eval_data", "fine.jsonl"], "--eval_data"), (["--data", "fine.jsonl", "--eval_data", "bad.jsonl"], "bad.jsonl, line 2"),
    (["--data", "empty.jsonl", "--eval_data", "fine.jsonl"], "empty.jsonl: no problems"),
    (["--data", "long.jsonl", "--eval_data", "fine.jsonl"], "--max_new_tokens"),
    (["--model", "nowhere"], "--model nowhere: "), (["--bogus", 1], "--bogus"), (["positional"], "positional"),
    (["--kee", 0.3], "--kee"), (["--out", "other"], "--out other: something is there"), (["--out", "fine.jsonl"], "--out fine.jsonl: "),
    (["--out", "fine.jsonl/run"], "--out fine.jsonl/run: "), (["--out", "/proc/nothing/run"], "--out /proc/nothing/run: "),
    (["--resume"], "--resume"), (["--resume", "--out", "nowhere"], "--resume --out nowhere"),
    (["--resume", "--out", "other"], "--resume --out other"),
]


@pytest.mark.parametrize("arguments, says", BAD, ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "")
def test_bad_input(tiny, tmp_path, capsys, tried, arguments, says):
    Path("fine.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    Path("bad.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "1+1?"}\n')
    Path("long.jsonl").write_text('{"question": "%s", "answer": "2"}\n' % ("x" * 500))
    Path("empty.jsonl").write_text("")
    Path("other").mkdir()
    Path("other/notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert cli(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("train.py: ") and captured.err.count("\n") == 1 and says in captured.err, captured.err
    assert sorted(tmp_path.rglob("*")) == before
    tried["bad command lines refused"] += 1


def test_an_unknown_model_folder_is_one_line(tiny, capsys):
    pytest.importorskip("safetensors")
    Path("folder").mkdir()
    assert cli("--model", "folder") == 2
    assert capsys.readouterr().err == "train.py: folder/config.json is missing, or not yet fetched by git-lfs\n"


@pytest.mark.parametrize("flag, value", [("--lr", "0.5"), ("--keep", "0.3"), ("--domain", "code"), ("--select", "all"), ("--seed", "1")])
def test_resume_refuses_changed_flags(tiny, tmp_path, capsys, tried, flag, value):
    assert cli("--steps", 1, "--out", "run") == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    capsys.readouterr()
    assert cli("--resume", "--out", "run", flag, value) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"train.py: {flag} ") and value in error and "began" in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    tried["bad command lines refused"] += 1


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pickle-ran",)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-2000])


def another_domain(path):
    state = train.read_checkpoint(path)
    state["config"]["domain"] = "logic"
    torch.save(state, path)


def another_format(path):
    torch.save({**train.read_checkpoint(path), "format": 99}, path)


@pytest.mark.parametrize("spoil", [
    truncated, another_domain, another_format, lambda path: torch.save({"format": 1, "config": Evil()}, path),
    lambda path: path.write_bytes(pickle.dumps(Evil(), protocol=2)), lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"text"),
    lambda path: torch.save([1, 2], path), lambda path: torch.save({"format": 1, "model": {}}, path),
    lambda path: torch.save(GPT(LETTERS), path)])
def test_checkpoints_that_are_refused(tiny, tmp_path, capsys, tried, spoil):
    assert cli("--steps", 1, "--out", "run") == 0
    path = tmp_path / "run" / "checkpoint.pt"
    spoil(path)
    left, metrics = path.read_bytes(), Path("run/metrics.csv").read_bytes()
    capsys.readouterr()
    assert cli("--steps", 2, "--out", "run", "--resume") == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: ") and error.count("\n") == 1
    assert not Path("pickle-ran").exists() and path.read_bytes() == left and Path("run/metrics.csv").read_bytes() == metrics
    if spoil is not another_domain:                             # which is whole, but for the config.json beside it
        with pytest.raises(ValueError):
            train.load_run("run")
    tried["spoiled checkpoints refused"] += 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"lr": "fast"}', '{"unknown": 1}', '{"domain": "chess"}', "null"])
def test_configs_that_are_refused(tiny, capsys, tried, text):
    Path("run").mkdir()
    Path("run/config.json").write_text(text)
    assert cli("--out", "run", "--resume") == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: --resume --out run") and error.count("\n") == 1
    assert [path.name for path in Path("run").iterdir()] == ["config.json"]
    tried["spoiled configurations refused"] += 1


# -------------------------------------------------------------------------------------- what a laptop does to a run

def wait_for(condition, process, seconds=120):
    end = time.time() + seconds
    while not condition() and process.is_alive() and time.time() < end:
        process.join(0.002)
    assert condition() or not process.is_alive()


def finish(process, folder):
    process.join(240)
    assert process.exitcode is not None
    return process.exitcode, (folder / "stdout").read_text("utf-8"), (folder / "stderr").read_text("utf-8")


def half_a_save(folder):
    """Whether tiny_run.py holds a save at its half; the saves before that one come and go while we look."""
    for path in folder.rglob("checkpoint.pt.*.tmp"):
        try:
            if b"half" in path.read_bytes()[:40]:
                return True
        except FileNotFoundError:
            pass
    return False


def kill_and_resume(tmp_path, kills, seed, tried):
    """Kill a run `kills` times, every second time inside a save; it has to end like one that was left alone."""
    rng = random.Random(seed)
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    alone.mkdir(), killed.mkdir()
    flags = ["--steps", "12", "--eval_every", "2", "--select", "random", "--epochs", "2", "--out", "run"]
    began = time.time()
    code, _, error = finish(tiny_run.start(flags, alone), alone)
    took = time.time() - began
    assert code == 0, error
    for kill in range(kills):
        goes_on = ["--resume"] if (killed / "run" / "config.json").exists() else []
        inside = kill % 2 == 0
        process = tiny_run.start([*flags, *goes_on], killed, stuck=rng.randint(2, 4) if inside else 0)
        if inside:
            wait_for(lambda: half_a_save(killed), process)
        else:
            process.join(rng.uniform(0, took))                  # a moment that nothing in the run marks
        process.kill()
        process.join()
        for path in killed.rglob("checkpoint.pt"):
            train.read_checkpoint(path)                         # whole at every moment
        for path in killed.rglob("*.tmp"):
            path.unlink()                                       # so that the next one is seen
        tried["kills survived"] += 1
    goes_on = ["--resume"] if (killed / "run" / "config.json").exists() else []
    code, _, error = finish(tiny_run.start([*flags, *goes_on], killed), killed)
    assert code == 0, error
    assert same(everything(alone / "run"), everything(killed / "run"))


def test_two_kills(tmp_path, tried):
    kill_and_resume(tmp_path, 2, 0, tried)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ten_kills(tmp_path, tried, seed):
    kill_and_resume(tmp_path, 10, seed + 1, tried)


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, tried):
    flags = ["--eval_every", "100", "--out", "run"]
    process = tiny_run.start(["--steps", "2000", *flags], tmp_path)
    wait_for(lambda: (tmp_path / "run/metrics.csv").exists() and len(read_csv(tmp_path / "run/metrics.csv")) > 3, process)
    os.kill(process.pid, signal.SIGINT)
    code, _, error = finish(process, tmp_path)
    assert code == 130 and "python train.py --resume --out run goes on" in error and error.count("\n") == 1, error
    state = train.read_checkpoint(tmp_path / "run/checkpoint.pt")
    assert f"after step {state['step']}, which is saved" in error and len(state["rows"]) == state["step"] + 1 > 3
    tried["interrupts survived"] += 1


def test_ctrl_c_before_there_is_a_run_promises_nothing(tiny, monkeypatch, capsys):
    monkeypatch.setattr(train, "prepare", lambda config: signal.raise_signal(signal.SIGINT))
    assert cli("--steps", 1) == 130
    assert capsys.readouterr().err == "train.py: interrupted\n" and not Path("out").exists()


def test_ctrl_c_in_the_warm_up_leaves_nothing_half_done(tiny, monkeypatch, capsys):
    cross_entropy, calls = train.F.cross_entropy, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return cross_entropy(*args, **kwargs)

    monkeypatch.setattr(train.F, "cross_entropy", interrupted)
    assert cli("--steps", 1, "--out", "run") == 130
    assert "python train.py --resume --out run goes on" in capsys.readouterr().err
    assert not Path("out/warmup").exists() and [p.name for p in Path("run").iterdir()] == ["config.json"]
    assert cli("--resume", "--out", "run") == 0
    assert cli("--steps", 1, "--out", "whole") == 0
    assert {n: v for n, v in read_csv("run/metrics.csv")[-1].items() if n not in TIMES} == \
        {n: v for n, v in read_csv("whole/metrics.csv")[-1].items() if n not in TIMES}


@pytest.mark.parametrize("limit", [3_000, 20_000])
def test_a_full_disk_is_one_line_and_leaves_the_checkpoint(tmp_path, tried, limit):
    assert finish(tiny_run.start(["--steps", "5", "--out", "run"], tmp_path), tmp_path)[0] == 0
    files = [tmp_path / "run" / name for name in ("checkpoint.pt", "metrics.csv", "samples.txt")]
    before = [path.read_bytes() for path in files]
    assert len(before[0]) > limit
    process = tiny_run.start(["--steps", "15", "--out", "run", "--resume"], tmp_path, limit=limit)
    code, _, error = finish(process, tmp_path)
    assert code == 1 and "is the disk full?" in error and error.count("\n") == 1, error
    assert files[0].read_bytes() == before[0] and not list(tmp_path.rglob("*.tmp"))
    assert files[1].read_bytes().startswith(before[1][:200])
    code, _, error = finish(tiny_run.start(["--steps", "15", "--out", "run", "--resume"], tmp_path), tmp_path)
    assert code == 0 and len(read_csv(files[1])) == 16
    tried["full disks survived"] += 1


def test_two_runs_at_once(tmp_path):
    flags = ["--steps", "6", "--out"]
    processes = [tiny_run.start([*flags, name], tmp_path) for name in ("a", "b")]
    for process in processes:
        process.join(240)
        assert process.exitcode == 0, (tmp_path / "stderr").read_text("utf-8")
    assert same(everything(tmp_path / "a"), everything(tmp_path / "b"))
    tmp_path.joinpath("c").mkdir()
    assert finish(tiny_run.start([*flags, "c"], tmp_path), tmp_path)[0] == 0
    assert same(everything(tmp_path / "a"), everything(tmp_path / "c"))


def test_a_plain_locale_and_a_pipe(tmp_path):
    lines = [json.dumps({"question": f"Wie gro\u00df sind {i} \u00c4pfel? \u2212", "answer": f"#### {i}"}) for i in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, ROOT / "tests/tiny_run.py", "--steps", "2", "--data", "data.jsonl", "--eval_data", "data.jsonl", "--out",
               "run", "--max_new_tokens", "9"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, stdin=subprocess.DEVNULL,
                          env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert done.returncode == 0, done.stderr
    assert b"\r" not in done.stdout + done.stderr and b"step    2  greedy" in done.stdout
    samples = (tmp_path / "run/samples.txt").read_text(encoding="utf-8")
    assert "\u00c4pfel" in samples and "\u2212" in samples


def test_stdout_closed_early(tmp_path):
    command = f"{sys.executable} {ROOT / 'tests/tiny_run.py'} --steps 5 --eval_every 1 --out run 2>stderr | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.stdout.splitlines()[-1] == "0" and (tmp_path / "stderr").read_text() == ""
    assert train.read_checkpoint(tmp_path / "run/checkpoint.pt")["step"] == 5


def test_questions_typed_at_a_run(tiny, capsys, monkeypatch):
    assert cli("--steps", 1, "--out", "run") == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["rollout.py", "run"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("7+5=?\n\na=1\\nprint(a)\n" + "long " * 40 + "\n\u00e4\n"))
    runpy.run_path(str(ROOT / "rollout.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out.startswith("Ask, ") and "do not fit the context of 160" in out
    monkeypatch.setattr(sys, "argv", ["rollout.py", "nowhere"])
    with pytest.raises(SystemExit, match="usage: python rollout.py RUN"):
        runpy.run_path(str(ROOT / "rollout.py"), run_name="__main__")


@pytest.mark.slow
def test_the_demonstrations_read_a_run(tmp_path):
    """rollout.py and gmts.py on the run of a real, if short, command line."""
    config = Config(out=str(tmp_path / "run"), level=2)
    run = train.prepare(config)
    run.folder.mkdir()
    run.save()
    for script, given in (("rollout.py", "7+5=?\n\nvery " + "long " * 300 + "?\n"), ("gmts.py", "")):
        done = subprocess.run([sys.executable, ROOT / script, tmp_path / "run"], cwd=tmp_path, input=given, capture_output=True,
                              text=True, errors="replace")
        assert done.returncode == 0 and len(done.stdout) > 100, done.stderr

"""The study: its plan, its statistics on hand-made numbers, one row of it made twice, and the committed table."""
import math
import os
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gmts
import rollout
import tiny_run
import train
from model import GPT, SIZES


@pytest.fixture(scope="module")
def study():
    before, folder = dict(gmts.SELECTIONS), train.WARMUP_FOLDER
    from assets import study
    gmts.SELECTIONS.clear()
    gmts.SELECTIONS.update(before)          # the study's controls are nobody else's business
    assert train.WARMUP_FOLDER != folder    # nor are its warm-ups, which have one thread
    train.WARMUP_FOLDER = folder
    return study


def row(arm, seed, avg, domain="math", **other):
    return {"part": "main", "arm": arm, "domain": domain, "size": "tiny", "loss": "grpo", "keep": "0.2", "lr": "0.0003",
            "scope": "batch", "seed": str(seed), "status": "ok", "start_avg": "0.1", "final_avg": str(avg),
            "final_greedy": str(avg), "final_pass": "0.9", "mean_reward": "0.3", "grad_norm_median": "0.2", **other}


def test_plan_names_every_run_once_with_flags_that_train_accepts(study, monkeypatch):
    keys = [study.key(part, arm, study.flags_of(arm, flags)) for part, arm, flags in study.plan()]
    assert len(set(keys)) == len(keys) > 700
    for part, arm, flags in study.plan():
        if arm in train.SELECTIONS:
            train.Config(**study.flags_of(arm, flags))
    main = {(f["domain"], arm, f["seed"][0]) for part, arm, f in study.plan() if part == "main"}
    assert main >= {(d, a, s) for d in ("math", "code", "logic") for a in study.ARMS for s in range(5)}


def test_interval_is_that_of_the_mean(study):
    assert study.interval([2.0, 2.0, 2.0]) == (2.0, 2.0, 2.0)
    values = np.random.default_rng(1).normal(3.0, 1.0, 200)
    mean, low, high = study.interval(values)
    half = 1.96 * values.std() / 200 ** 0.5
    assert mean == values.mean() and low == pytest.approx(mean - half, abs=0.02)
    assert high == pytest.approx(mean + half, abs=0.02)


def test_differences_are_paired_by_seed_and_pooled_over_whole_seeds(study):
    table = [row("gmts", 0, 0.50), row("gmts", 1, 0.60), row("gmts", 0, 0.40, "code"), row("gmts", 2, 0.9),
             row("entropy", 1, 0.50), row("entropy", 0, 0.48), row("entropy", 0, 0.30, "code")]
    (arms,) = study.settings(table).values()
    assert study.gaps(arms["gmts"], arms["entropy"], "math") == pytest.approx([2.0, 10.0])
    assert study.gaps(arms["gmts"], arms["entropy"]) == pytest.approx([6.0])        # seed 0 alone has both domains
    assert study.gaps(arms["gmts"], arms["all"]) == []
    other = study.settings([*table, row("entropy", 2, 0.1, start_avg="0.2")])       # of another warm-up: no pair
    assert study.gaps(arms["gmts"], next(iter(other.values()))["entropy"], "math") == pytest.approx([2.0, 10.0])
    assert study.cell([2.0, 10.0, -3.0]).startswith("+3.0 [") and study.cell([2.0, 10.0, -3.0]).endswith(", 2/3")


def test_a_setting_borrows_the_runs_on_all_tokens_of_the_main_part(study):
    table = [row("all", 0, 0.7), row("gmts", 0, 0.5), row("gmts", 0, 0.3, part="keep", keep="0.05"),
             row("all", 0, 0.6, part="dapo", loss="dapo"), row("gmts", 0, 0.4, part="dapo", loss="dapo")]
    found = {name[0]: arms for name, arms in study.settings(table).items()}
    assert study.gaps(found["keep"]["gmts"], found["keep"]["all"]) == pytest.approx([-40.0])
    assert study.gaps(found["dapo"]["gmts"], found["dapo"]["all"]) == pytest.approx([-20.0])
    table += [row("gmts", 0, 0.4, part="small", size="small"), row("gmts", 0, 0.4, part="lr", lr="0.001")]
    found = {name[0]: arms for name, arms in study.settings(table).items()}
    assert found["small"]["all"] == found["lr"]["all"] == {}                # other sizes and rates borrow nothing


@pytest.mark.parametrize("part", ["main", "random reward"])
def test_a_row_made_twice_has_the_same_numbers(study, part, tmp_path, monkeypatch):
    """The first time with the evaluation before its first step, the second time with that one's remembered."""
    tiny_run.shrink(monkeypatch.setattr, monkeypatch.setitem)
    monkeypatch.chdir(tmp_path)
    for name in ("say", "collect", "evaluate"):                     # which a run of the study replaces
        monkeypatch.setattr(train, name, getattr(train, name))
    flags = {**study.COMMON, "select": ("gmts",), "domain": "math", "seed": (1,), "steps": 12, "prompts": 4,
             "group_size": 4, "eval_problems": 6, "max_new_tokens": 12}
    collect, evaluate, evaluated, rows = train.collect, train.evaluate, [], []
    for _ in range(2):
        train.collect, train.evaluate = collect, lambda run: (evaluated.append(run.step), evaluate(run))[1]
        rows.append(study.run_one(part, "gmts", flags))
    assert evaluated == [0, 12, 12]
    assert set(rows[0]) == set(study.FIELDS) - {"commit"}
    assert {n: v for n, v in rows[0].items() if n != "minutes"} == {n: v for n, v in rows[1].items() if n != "minutes"}
    assert math.isfinite(float(rows[0]["final_avg"])) and float(rows[0]["grad_norm_max"]) > 0


def test_another_start_or_another_evaluation_is_not_mistaken_for_a_remembered_one(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "evaluate", lambda run: {"count": len(counted.append(1) or counted)})
    counted, model = [], torch.nn.Linear(2, 2)
    study.remember_start()

    def count(step=0, **flags):
        return train.evaluate(SimpleNamespace(step=step, model=model, config=train.Config(**flags)))["count"]

    train.WARMUP_FOLDER.mkdir(parents=True)
    assert [count(), count(), count(eval_samples=4), count(domain="code"), count(step=1)] == [1, 1, 2, 3, 4]
    torch.nn.init.zeros_(model.weight)
    assert [count(), count()] == [5, 5]


@pytest.mark.parametrize("name", ["gmts", "entropy"])
def test_the_cosines_are_those_of_the_updates_that_a_run_makes(study, monkeypatch, name):
    tiny_run.shrink(monkeypatch.setattr, monkeypatch.setitem)
    monkeypatch.setitem(gmts.SELECTIONS, "norm", lambda entropy, omega, norm: norm)
    gradients = {}

    def begin(select):
        run = train.prepare(train.Config(select=(select,), keep=0.1, prompts=6, group_size=4, max_new_tokens=40,
                                         clip_grad=0.0))
        for p in run.model.parameters():
            p.data *= 3                                             # surer than random weights: some answers end early
        monkeypatch.setattr(run.optimizer, "step", lambda: gradients.update({select: torch.cat(
            [p.grad.flatten() for p in run.model.parameters()]).double()}))
        return run

    for select in ("all", name):
        train.reinforce(begin(select))
    rollout, _, found = study.first_batch(begin("all"))
    lengths = rollout.answer_mask.sum(dim=1)
    assert lengths.max() > 2 * lengths.min()                        # else every token would weigh alike
    assert found[name, 0.1][0] == pytest.approx(float(torch.cosine_similarity(*gradients.values(), dim=0)), abs=1e-5)


def test_surprise_stands_in_the_place_of_the_norm_in_the_rollout_and_in_the_scoring(study, monkeypatch):
    monkeypatch.setattr(rollout, "token_stats", rollout.token_stats)
    study.surprise_for_norm()
    logits, ids = torch.randn(5, 7), torch.arange(5)
    logprob, entropy, surprise = rollout.token_stats(logits, ids)
    assert torch.allclose(surprise, -logits.log_softmax(-1)[ids, ids]) and torch.equal(surprise, -logprob)
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"])
    batch = rollout.generate(model, [[1, 2], [3]], 2, 6, (256,))
    assert torch.equal(batch.logit_grad_norm, -batch.logprobs)
    logprobs, _, surprise = rollout.score(model, batch)
    assert torch.equal(surprise, -logprobs) and float(surprise.max()) > 1


def test_words_choose_the_runs_that_fit_them_all(study, monkeypatch, capsys):
    monkeypatch.setattr(study, "read_table", lambda: [])
    for words in ([], ["code"], ["code", "small"], ["small groups"], ["main", "logic", "tiny"]):
        study.run(words, 1, 0, False)                               # no minutes: it says how many there are
        fitting = [flags for part, _, flags in study.plan()
                   if all(word in (part, flags["domain"], flags.get("size", "tiny")) for word in words)]
        assert capsys.readouterr().out == f"{len(fitting)} runs to do, 0 done\n" and fitting
    with pytest.raises(SystemExit, match="no chess: choose from base, .*, math"):
        study.run(["code", "chess"], 1, 0, False)


@pytest.mark.parametrize("cpu", ["any x86", "AVX512"])
def test_workers_round_as_the_row_that_they_repeat(study, monkeypatch, cpu):
    for name in study.ANY_X86:
        monkeypatch.setenv(name, "as before")
    with study.workers(1, cpu == "any x86") as pool:
        found = [pool.submit(os.getenv, name).result() for name in study.ANY_X86]
    assert found == (list(study.ANY_X86.values()) if cpu == "any x86" else [None] * 3)


@pytest.mark.parametrize("cpu, same", [("AVX512", False), ("AVX512", True), ("any x86", False)])
def test_again_says_what_differs_and_whether_the_machine_does(study, monkeypatch, capsys, cpu, same):
    part, arm, flags = next(iter(study.plan()))
    old = dict.fromkeys(study.FIELDS, "0.5") | {"part": part, "arm": arm, "torch": "2.13.0", "cpu": cpu,
                                                "flags": study.key(part, arm, study.flags_of(arm, flags))[2]}
    new = old | {"minutes": "7", "commit": "", "cpu": "any x86"} | ({} if same else {"final_avg": "0.6"})
    pool = SimpleNamespace(submit=lambda *_: SimpleNamespace(result=lambda: new))
    monkeypatch.setattr(study, "workers", lambda jobs, any_x86: nullcontext(pool))
    monkeypatch.setattr(study, "read_table", lambda: [old])
    assert study.again(1) is not same
    said = capsys.readouterr().out
    assert ("the same numbers again" in said) is same and ("differs in final_avg" in said) is not same
    assert ("round differently" in said) is (not same and cpu == "AVX512")
    with pytest.raises(SystemExit, match="has 1 rows"):
        study.again(2)


def test_random_rewards_are_a_coin_and_spare_the_evaluation(study, monkeypatch):
    monkeypatch.setattr(train, "collect", lambda run: ("rollout", "texts", torch.ones(200, 8), "groups"))
    study.random_rewards(0)
    rewards = train.collect(None)[2]
    assert set(rewards.unique().tolist()) == {0.0, 1.0} and abs(float(rewards.mean()) - 0.5) < 0.05


def test_every_committed_row_is_in_the_plan_and_holds_numbers(study, tried):
    planned = {study.key(part, arm, study.flags_of(arm, flags)) for part, arm, flags in study.plan()}
    table = study.read_table()
    names = [(r["part"], r["arm"], r["flags"]) for r in table]
    assert len(set(names)) == len(names) and set(names) <= planned
    starts = {}
    for r in table:
        start = r["domain"], r["size"], r["seed"], r["part"] == "base 3e-3"
        starts.setdefault(start, set()).add((r["torch"], r["cpu"], r["start_avg"]))
        assert all(0 <= float(r[name]) <= 1
                   for name in ("start_greedy", "start_avg", "final_greedy", "final_avg", "mean_reward"))
        tried["rows of the study read"] += 1
    assert all(len(start) == 1 for start in starts.values())            # all arms of a seed began from one policy


def test_the_readme_has_the_tables_of_the_study(study):
    readme = (study.ROOT / "README.md").read_text(encoding="utf-8")
    lines = study.overview(study.read_table())
    assert sum(line.startswith("| ") for line in lines) > 15
    assert not [line for line in lines if line not in readme]
    runs, below = len(study.read_table()), sum(r["status"] != "ok" for r in study.read_table())
    counts = f"has {len(study.plan())} runs, of which {runs} are done, {below} of them ending below their start"
    assert counts in " ".join(readme.split())


def test_the_overview_compares_the_seeds_that_all_arms_have(study):
    table = [row("all", 0, 0.7), row("gmts", 0, 0.5), row("all", 1, 0.8), row("gmts", 1, 0.7), row("gmts", 2, 0.1),
             *(row(arm, seed, avg, part="scope", scope="group") for arm, seed, avg in
               (("gmts", 0, 0.4), ("gmts", 1, 0.6), ("entropy", 1, 0.2)))]
    lines = study.overview(table)
    assert "| 20% |  | -15.0 [-20.0, -10.0], 2/2 |  |  | 2 |" in lines
    assert "| 20%, of each group | math | .800 |  | .600 | .200 |  | 1 |" in lines


def test_report_draws_the_figure_from_the_table_alone(study, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    lines = study.TABLE.read_text(encoding="utf-8")
    monkeypatch.setattr(study, "TABLE", tmp_path / "study.csv")
    study.TABLE.write_text(lines, encoding="utf-8")
    study.report()
    printed = capsys.readouterr().out
    assert "### main: tiny, grpo, keep 0.2" in printed and "| minus entropy | math" in printed
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")

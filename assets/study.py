"""The study: does choosing tokens by gradient magnitude help, and when?  Every run is one row of assets/study.csv.

    python assets/study.py run [WORD ...] [--jobs 2] [--minutes 60]   runs what the CSV lacks; stop it, go on with it
    python assets/study.py report                      the tables and assets/study.png from the CSV, in seconds
    python assets/study.py why [FLAGS OF train.py]     what each score keeps of the policy that the runs start from
    python assets/study.py again ROW                   runs one row of the CSV once more and compares

WORDs choose runs by part, domain and size; all have to fit.  All arms of a seed share the warm-up, the problem order,
the sampling seed and the divisor.  One process per core with one thread each.  A row gives the same numbers again with
the same torch on the same kind of CPU; those of `run --any_x86` on Intel's and AMD's alike (with AVX2), for more time.
"""
import argparse
import csv
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import numpy as np
import torch

import gmts

# Controls that only the study needs; before train, which reads the names for its flags.  "norm" and "omega" are each one
# factor of "exact"; "surprise" is -log p of the sampled token, which run_one puts in the place of the norm.
gmts.SELECTIONS["norm"] = gmts.SELECTIONS["surprise"] = lambda entropy, omega, norm: norm
gmts.SELECTIONS["omega"] = lambda entropy, omega, norm: omega.abs()
import train

TABLE = ROOT / "assets" / "study.csv"
# A sum is rounded as the CPU's own instructions add it up; with these settings, Intel's and AMD's do it alike.  A step
# then takes half as long again, a warm-up five times as long.  They count from a process's start: workers get them.
ANY_X86 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
CPU = torch.backends.cpu.get_cpu_capability()                       # AVX2, AVX512, ..., as ANY_X86 may limit it
if ANY_X86.items() <= os.environ.items() and CPU == "AVX2":
    CPU = "any x86"
train.WARMUP_FOLDER = Path("out", f"warmup-study-{CPU.replace(' ', '-')}")     # train.py's own has other threads
COMMON = {"steps": 60, "prompts": 16, "group_size": 8, "lr": 3e-4, "clip_grad": 0.0, "eval_every": 60,
          "eval_samples": 16, "eval_problems": 512}
HEADLINE = ("From 20% of the tokens every score learns about as much as from all; from 5%, entropy learns next to nothing\n"
            "and GMTS less; the exact score, omega times the norm over the logits, loses little even from 2%")
ARMS = ("all", "random", "entropy", "gmts", "exact")
FIELDS = ("part arm domain size loss keep scope lr seed status start_greedy start_avg final_greedy final_avg "
          "final_pass mean_reward steps_to_half last_reward grad_norm_median grad_norm_max entropy_final "
          "overlap_entropy kept_right dead_groups minutes commit torch cpu flags").split()


def plan():
    """All runs, what tells most first: (part, arm, flags)."""
    runs = []

    def add(part, arms, domains, seeds, **flags):
        runs.extend((part, arm, {"domain": domain, "seed": (seed,), **flags})
                    for seed in seeds for domain in domains for arm in arms)

    few = ("random", "entropy", "gmts", "exact", "norm")
    for seed in range(5):
        for domain in train.DOMAINS:
            add("main", ARMS, (domain,), (seed,))
            if seed < 3:
                add("keep", few, (domain,), (seed,), keep=0.05)
    # Is what entropy loses at 5% a matter of its learning rate?
    add("lr", ("entropy", "gmts", "exact"), ("math",), range(3), lr=1e-4, keep=0.05)
    # Groups of 4 of a policy that is seldom right are dead more often: there entropy wastes slots that GMTS does not.
    add("small groups", ARMS, ("math",), range(3), prompts=32, group_size=4)
    for seed in range(3):
        add("dapo", ARMS, ("math",), (seed,), loss="dapo")
        add("small", ARMS, ("math",), (seed,), size="small")
        add("small", few[1:4], ("math",), (seed,), size="small", keep=0.05)
        add("several updates", ARMS, ("math",), (seed,), epochs=2, inner_batches=2)
        add("random reward", ARMS, ("math",), (seed,))
        add("bottom", few[1:3], train.DOMAINS, (seed,), bottom=True, keep=0.8)
        add("scope", few[1:4], ("math",), (seed,), scope="group")
        for keep in (0.1, 0.02):
            add("keep", few[:4], train.DOMAINS, (seed,), keep=keep)
        for lr in (1e-4, 1e-3):
            add("lr", ARMS, ("math",), (seed,), lr=lr)
        if seed == 0:
            add("base 3e-3", ARMS, ("math",), (0,), size="base")
    # Does a cap on a group's or an answer's share mend what entropy loses?
    add("scope", few[1:4], ("math",), range(3), keep=0.05, scope="group")
    add("scope", ("entropy",), ("math",), (0,), keep=0.05, scope="answer")
    add("keep", ("omega", "surprise"), train.DOMAINS, (0,), keep=0.05)
    add("keep", ("omega",), ("math",), (1,), keep=0.05)
    add("keep", few[:4], train.DOMAINS, (0,), keep=0.5)
    # So far on one kind of CPU.  From here on another one, which warms up to other policies: so these have other seeds.
    for seed in (5, 6):
        for domain in train.DOMAINS:
            add("main", ARMS, (domain,), (seed,))
            add("keep", few[:4], (domain,), (seed,), keep=0.5)
            add("keep", (*few, "omega", "surprise"), (domain,), (seed,), keep=0.05)
    for seed in (5, 6):
        add("several updates", ARMS, train.DOMAINS, (seed,), epochs=2, inner_batches=2)
        for keep in (0.1, 0.02):
            add("keep", few[:4], train.DOMAINS, (seed,), keep=keep)
        for scope in ("group", "answer"):
            add("scope", few[1:4], ("math",), (seed,), keep=0.05, scope=scope)
    add("base", ("all", "gmts", "entropy", "exact", "random"), ("math",), (0,), size="base")
    add("base", few[1:4], ("math",), (0,), size="base", keep=0.05)
    for seed in range(5, 8):
        add("small", ARMS, ("code", "logic"), (seed,), size="small")
    for lr in (6e-4, 1e-4, 1e-3):
        add("lr", ARMS, ("math",) if lr == 6e-4 else train.DOMAINS, (5, 6), lr=lr)
    add("small groups", ARMS, ("code", "logic"), (5, 6), prompts=32, group_size=4)
    add("main", ("norm", "omega"), train.DOMAINS, (5, 6))
    for keep in (0.02, 0.1, 0.5):
        add("keep", ("norm", "omega"), train.DOMAINS, (5, 6), keep=keep)
    seen = set()
    return [run for run in runs if (name := repr(run)) not in seen and not seen.add(name)]


def flags_of(arm, flags):
    return {**COMMON, "select": (arm,), **flags}


def key(part, arm, flags):
    """What tells runs apart: all flags, so that a changed setting is a new run."""
    return part, arm, " ".join(f"--{k} {v[0] if isinstance(v, tuple) else v}" for k, v in sorted(flags.items()))


def random_rewards(seed):
    """Patch the training reward, not the evaluation, to a coin: what the loop does without any signal."""
    collect, coin = train.collect, torch.Generator().manual_seed(seed)

    def collect_at_random(run):
        rollout, texts, rewards, groups = collect(run)
        return rollout, texts, torch.randint(0, 2, rewards.shape, generator=coin).float(), groups

    train.collect = collect_at_random


def remember_start():
    """Patch the evaluation before the first step: the runs that start from the same policy share it, in a file."""
    evaluate = train.evaluate

    def evaluate_once(run):
        if run.step:
            return evaluate(run)
        start = hashlib.sha256(repr((run.config.domain, run.config.eval_problems, run.config.eval_samples)).encode())
        for p in run.model.parameters():
            start.update(p.detach().numpy().tobytes())
        path = train.WARMUP_FOLDER / f"start-{start.hexdigest()[:16]}.json"
        if not path.exists():
            train.write_whole(path, json.dumps(evaluate(run)))
        return json.loads(path.read_text(encoding="utf-8"))

    train.evaluate = evaluate_once


def surprise_for_norm():
    """Patch what the rollout and the scoring record: -log p of the sampled token where the exact norm would stand."""
    import rollout
    stats = rollout.token_stats

    def with_surprise(logits, targets):
        logprob, entropy, _ = stats(logits, targets)
        return logprob, entropy, -logprob

    rollout.token_stats = with_surprise


def warm_up(flags):
    """Make the warm-up that all runs of one domain, size and seed start from, unless it is there."""
    torch.set_num_threads(1)
    train.warm_up(train.prepare(train.Config(**flags)))


def run_one(part, arm, flags):
    """Train one arm; returns its row.  A run that breaks is a row too."""
    torch.set_num_threads(1)
    train.say = lambda text: None
    started = time.time()
    row = {"part": part, "arm": arm, "flags": key(part, arm, flags)[2], "status": "ok", "cpu": CPU,
           "torch": torch.__version__.split("+")[0]}
    with tempfile.TemporaryDirectory() as folder:
        config = train.Config(**flags, out=f"{folder}/run")
        row |= {name: getattr(config, name) for name in ("domain", "size", "loss", "keep", "scope", "lr")}
        row["seed"] = config.seed[0]
        if part == "base 3e-3":     # its first runs: a warm-up at the rate of the others left it unable to learn
            train.WARMUP_LR = train.WARMUP_LR | {"base": 3e-3}
        if part == "random reward":
            random_rewards(config.seed[0])
        if arm == "surprise":
            surprise_for_norm()
        remember_start()
        try:
            train.train(config)
        except FloatingPointError as error:
            row["status"] = f"broke: {error}"
        with open(f"{config.out}/metrics.csv", encoding="utf-8", newline="") as file:
            rows = [{k: float(v) for k, v in line.items() if v} for line in csv.DictReader(file)]
    evaluated, steps = [r for r in rows if "eval_greedy" in r], [r for r in rows if "reward" in r]
    first, last, (avg, pass_k) = evaluated[0], evaluated[-1], train.columns(config)[-2:]
    if row["status"] == "ok" and last[avg] < first[avg]:
        row["status"] = "collapsed"

    def tail(name):
        return float(np.mean([r[name] for r in steps[-10:] if name in r] or [math.nan]))

    reward = np.array([r["reward"] for r in steps])
    smooth = np.convolve(reward, np.ones(5) / 5, "valid")               # entry i: the mean of steps i + 1 to i + 5
    row |= {"start_greedy": first["eval_greedy"], "start_avg": first[avg], "final_greedy": last["eval_greedy"],
            "final_avg": last[avg], "final_pass": last[pass_k], "mean_reward": float(reward.mean()),
            "steps_to_half": int(np.argmax(smooth >= 0.5)) + 5 if (smooth >= 0.5).any() else math.nan,
            "last_reward": tail("reward"), "grad_norm_median": float(np.median([r["grad_norm"] for r in steps])),
            "grad_norm_max": max(r["grad_norm"] for r in steps), "entropy_final": tail("entropy"),
            "overlap_entropy": tail("overlap_entropy"), "kept_right": tail("kept_right"),
            "dead_groups": tail("dead_groups"), "minutes": (time.time() - started) / 60}
    return {name: f"{row[name]:.5g}" if isinstance(row[name], float) else row[name] for name in FIELDS if name in row}


def read_table():
    if not TABLE.exists():
        return []
    with open(TABLE, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def workers(jobs, any_x86):
    """Processes to run runs in, a fresh one for each, so that nothing of one (a patched reward) reaches the next."""
    if any_x86:
        os.environ.update(ANY_X86)
    else:
        for name in ANY_X86:
            os.environ.pop(name, None)
    return ProcessPoolExecutor(jobs, max_tasks_per_child=1, mp_context=torch.multiprocessing.get_context("spawn"))


def commit():
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()


def run(words, jobs, minutes, any_x86):
    """Run what is missing, `jobs` at a time, starting none after `minutes`; a row is written as soon as it is there."""
    names = [{part, flags["domain"], flags.get("size", "tiny")} for part, _, flags in plan()]
    if unknown := {*words} - (known := set.union(*names)):
        sys.exit(f"no {', '.join(sorted(unknown))}: choose from {', '.join(sorted(known))}")
    done = {(r["part"], r["arm"], r["flags"]) for r in read_table()}
    todo = [(p, a, flags_of(a, f)) for (p, a, f), name in zip(plan(), names) if name >= {*words}]
    todo = [t for t in todo if key(*t) not in done]
    print(f"{len(todo)} runs to do, {len(done)} done", flush=True)
    deadline, version, running, started, warm = time.time() + 60 * minutes, commit(), {}, set(), set()
    with workers(jobs, any_x86) as pool:

        def start():
            """Start the first run whose warm-up is there, or a warm-up that nobody makes yet; False if none can."""
            for task in todo:
                flags = task[2]
                start_point = flags["domain"], flags.get("size", "tiny"), flags["seed"]
                if start_point in warm:
                    todo.remove(task)
                    running[pool.submit(run_one, *task)] = None
                    return True
                if start_point not in started:
                    started.add(start_point)
                    running[pool.submit(warm_up, flags)] = start_point
                    return True
            return False

        while running or todo and time.time() < deadline:
            while len(running) < jobs and time.time() < deadline and start():
                pass
            finished = next(as_completed(running))
            if (start_point := running.pop(finished)) is not None:
                finished.result()
                warm.add(start_point)
                continue
            row = finished.result() | {"commit": version}
            new = not TABLE.exists()
            with open(TABLE, "a", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row)
            print(*(row[name] for name in ("part", "arm", "domain", "keep", "lr", "seed", "status")), "greedy",
                  row["start_greedy"], "->", row["final_greedy"], "avg", row["final_avg"], row["minutes"], "min",
                  flush=True)


def again(number):
    """Run row `number` (from 1) of the table once more; says whether every result is the same."""
    if not 1 <= number <= len(table := read_table()):
        sys.exit(f"{TABLE} has {len(table)} rows: choose one, such as again 1")
    old = table[number - 1]
    part, arm, flags = next((p, a, flags_of(a, f)) for p, a, f in plan()
                            if key(p, a, flags_of(a, f)) == (old["part"], old["arm"], old["flags"]))
    with workers(1, old["cpu"] == "any x86") as pool:
        new = pool.submit(run_one, part, arm, flags).result()
    changed = [n for n in FIELDS if n not in ("minutes", "commit", "torch", "cpu") and old[n] != str(new.get(n, ""))]
    print(f"row {number}, {arm}: " + (f"differs in {', '.join(changed)}" if changed else "the same numbers again"))
    if changed and (old["torch"], old["cpu"]) != (new["torch"], new["cpu"]):
        print("They round differently: it was run with torch {torch} on {cpu},".format_map(old),
              "and now with torch {torch} on {cpu}".format_map(new))
    return bool(changed)


def interval(values, resamples=4000):
    """Mean of values and its 95% interval, by drawing seeds with replacement: too narrow for few, with 3 their range."""
    values = np.array(values)
    draws = values[np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))].mean(axis=1)
    return values.mean(), *np.quantile(draws, (0.025, 0.975))


def settings(table):
    """{(part, size, loss, lr, keep, scope): {arm: {(domain, seed): row}}}.  What is kept and within what changes nothing
    for all tokens, so the parts that vary only this borrow those runs from the main part."""
    found = {}
    for row in table:
        part = "main" if row["part"] == "keep" and row["keep"] == "0.2" else row["part"]
        keep = "" if row["arm"] == "all" and part != "keep" else row["keep"]
        name = part, row["size"], row["loss"], row["lr"], keep, row["scope"]
        found.setdefault(name, {}).setdefault(row["arm"], {})[row["domain"], int(row["seed"])] = row
    everything = {name[:4] + name[5:]: found.pop(name)["all"] for name in [*found] if not name[4]}
    main = {part: runs for name, runs in everything.items() if name[0] == "main" for part in ("keep", "scope", "bottom")}
    return {name: {"all": everything.get(name[:4] + name[5:], main.get(name[0], {})), **arms}
            for name, arms in found.items()}


def pairs(arm, other):
    """The (domain, seed) where both arms have a run from the same policy."""
    return {at for at in arm.keys() & other.keys() if arm[at]["start_avg"] == other[at]["start_avg"]}


def gaps(arm, other, domain=None):
    """Paired differences of avg@16, in points: one per seed of a domain, or the mean over the domains that both arms
    have, for the seeds that have them all."""
    common = sorted(pairs(arm, other))
    domains = {d for d, _ in common} if domain is None else {domain}
    seeds = [s for s in sorted({s for _, s in common}) if all((d, s) in common for d in domains)]
    return [100 * float(np.mean([float(arm[d, s]["final_avg"]) - float(other[d, s]["final_avg"]) for d in domains]))
            for s in seeds if domains]


def cell(differences):
    """A difference with its interval and how many seeds have its sign, as text."""
    if not differences:
        return ""
    mean, low, high = interval(differences)
    same = sum((d > 0) == (mean > 0) for d in differences)
    between = f" [{low:+.1f}, {high:+.1f}], {same}/{len(differences)}" if len(differences) > 1 else ", one seed"
    return f"{mean:+.1f}{between}"


def overview(table):
    """The README's two tables, as lines: the loss against all tokens by share kept, over the domains; and avg@16 in the
    other settings, over the seeds that all arms of a line have."""
    shown, found = ("exact", "gmts", "entropy", "random"), settings(table)
    lines = ["| tokens kept | " + " | ".join(shown) + " | seeds |", "|---" * 6 + "|"]
    for keep in ("0.5", "0.2", "0.1", "0.05", "0.02"):
        if arms := found.get(("main" if keep == "0.2" else "keep", "tiny", "grpo", "0.0003", keep, "batch")):
            differences = [gaps(arms.get(arm, {}), arms["all"]) for arm in shown]
            lines.append(f"| {float(keep):.0%} | " + " | ".join(map(cell, differences))
                         + f" | {max(map(len, differences))} |")
    lines += ["", "| setting | domain | all | " + " | ".join(shown) + " | seeds |", "|---" * 8 + "|"]
    for (part, size, _, lr, keep, scope), arms in found.items():
        what = {"lr": f"learning rate {lr}", "small": "1M parameters", "base": "5M parameters", "scope": f"of each {scope}",
                "base 3e-3": "5M, warmed up at 3e-3", "bottom": "the lowest", "small groups": "32 groups of 4",
                "random reward": "a coin for a reward"}
        for domain in train.DOMAINS if part not in ("main", "keep") else ():
            here = {arm: {at for at in pairs(runs, arms["all"]) if at[0] == domain} for arm, runs in arms.items()}
            here = {arm: places for arm, places in here.items() if places}
            if len(here) > 1 and (common := set.intersection(*here.values())):
                means = [f"{np.mean([float(arms[arm][at]['final_avg']) for at in common]):.3f}"[1:] if arm in here else ""
                         for arm in ("all", *shown)]
                lines.append(f"| {float(keep):.0%}, {what.get(part, part)} | {domain} | " + " | ".join(means)
                             + f" | {len(common)} |")
    return lines


def report():
    """Print Markdown tables: accuracy of each arm, then its paired differences to entropy and to all; draw a figure."""
    if not (table := read_table()):
        sys.exit(f"{TABLE} has no rows yet: python assets/study.py run")
    print("\n".join(overview(table)))
    print("\nDifferences: points of avg@16, [95% interval over seeds], seeds of that sign / seeds.")
    for name, arms in settings(table).items():
        part, size, loss, lr, keep, scope = name
        domains = sorted({d for runs in list(arms.values())[1:] for d, _ in runs}, key=[*train.DOMAINS].index)
        print(f"\n### {part}: {size}, {loss}, keep {keep}, learning rate {lr}, scope {scope}\n")
        head = ["arm", *(f"{d} avg@16" for d in domains), "greedy", "pass@8", "mean reward",
                "gradient norm", "runs", "broken or below start"]
        print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
        for arm, runs in arms.items():
            runs = {place: row for place, row in runs.items() if place[0] in domains}
            cells = [[float(r["final_avg"]) for (d, _), r in runs.items() if d == domain] for domain in domains]
            numbers = [(f"{np.mean(c):.3f}" + (f" +- {np.std(c, ddof=1):.3f}" if c[1:] else "")) if c else ""
                       for c in cells]
            numbers += [f"{np.mean([float(r[n]) for r in runs.values()]):.3f}" if runs else ""
                        for n in ("final_greedy", "final_pass", "mean_reward", "grad_norm_median")]
            print("| " + " | ".join([arm, *numbers, str(len(runs)),
                                     str(sum(r["status"] != "ok" for r in runs.values()))]) + " |")
        for other in ("entropy", "all"):
            if not arms.get(other):
                continue
            print(f"\n| minus {other} | " + " | ".join([*domains, "all domains", "seeds to see 1 point"]) + " |\n"
                  + "|---" * (len(domains) + 3) + "|")
            for arm, runs in arms.items():
                pooled = gaps(runs, arms[other])
                if arm != other and pooled:     # a two-sided test at 5%, 80% power; + 2: the spread is an estimate
                    needed = math.ceil((2.8 * np.std(pooled, ddof=1)) ** 2 + 2) if pooled[2:] else ""
                    print(f"| {arm} | " + " | ".join([*(cell(gaps(runs, arms[other], d)) for d in domains),
                                                     cell(pooled), str(needed)]) + " |")
    draw(table)


def draw(table):
    """assets/study.png: the difference to all tokens against the share kept, a line per score, a dot per pair of runs."""
    from assets.pictures import COLOURS, picture, plt
    if not plt:
        return print("\nno figure: pip install matplotlib")
    arms = {float(name[4]): arms for name, arms in settings(table).items()
            if name[0] in ("main", "keep") and name[1:4] == ("tiny", "grpo", "0.0003")}
    keeps, marks = sorted(arms), dict(zip(("gmts", "entropy", "exact"), "^so"))
    figure, panels = plt.subplots(1, len(train.DOMAINS), figsize=(11.8, 4.4), sharey=True)
    for axes, domain in zip(panels, train.DOMAINS):
        for i, arm in enumerate(("exact", "gmts", "entropy", "random")):
            points = {keep: gaps(arms[keep].get(arm, {}), arms[keep]["all"], domain) for keep in keeps}
            points = {keep: values for keep, values in points.items() if values}
            axes.plot([*points, 1.0], [*map(np.mean, points.values()), 0.0], color=COLOURS[arm], lw=2,
                      marker=marks.get(arm, "D"), ms=6, label=arm)
            axes.plot([keep * 1.06 ** (i - 1.5) for keep, values in points.items() for _ in values],
                      [y for values in points.values() for y in values], ".", color=COLOURS[arm], ms=5, alpha=0.6)
        everything = [r for r in table if (r["part"], r["arm"], r["domain"]) == ("main", "all", domain)]
        before = [100 * (float(r["start_avg"]) - float(r["final_avg"])) for r in everything]
        axes.axhline(np.mean(before or [math.nan]), color="black", lw=1, ls="--", label="before training")
        axes.set(xscale="log", xlabel="share of tokens kept", title=domain)
        axes.set_xticks([*keeps, 1.0], [f"{keep:g}" for keep in (*keeps, 1.0)])
        axes.minorticks_off()
    panels[0].set_ylabel("points of avg@16 against all tokens, same seed")
    panels[-1].legend(loc="lower right", fontsize=10)
    picture(TABLE.with_suffix(".png"), figure, HEADLINE)


NAMES, KEEPS = ("exact", "gmts", "norm", "entropy", "random"), (0.02, 0.05, 0.1, 0.2, 0.5)


def first_batch(run):
    """A batch of a policy as it is: its Rollout, {(score, keep): kept (B, T)}, and for each of these the cosine of its
    update with that of all tokens, the kept tokens' share in dead groups, in right answers, of answers' first tokens,
    and their mean surprise -log p."""
    G, draw = run.config.group_size, torch.Generator(run.device).manual_seed(0)
    rollout, _, rewards = run.grade(run.next_problems(run.config.prompts), G, run.config.temperature, draw)
    A, live = gmts.group_advantages(rewards).flatten(), rollout.answer_mask                 # (B,), (B, T)
    omega, right, first = A[:, None] * live, (rewards.flatten() > 0)[:, None], torch.zeros_like(live)
    first[torch.arange(len(live)), rollout.prompt_lengths] = True
    kept = {}
    for name in NAMES:
        scores = gmts.token_scores(name, rollout.entropy, omega, rollout.logit_grad_norm, draw)     # (B, T)
        kept |= {(name, keep): gmts.select_tokens(scores, live, keep) for keep in KEEPS}
    some, weight = A != 0, omega * gmts.loss_weights(live, live, "answer")      # dead groups add nothing to an update
    cosines = gmts.update_cosines(run.model, rollout.tokens[some], live[some], weight[some],
                                  {choice: mask[some] for choice, mask in kept.items()}, run.config.temperature)
    return rollout, kept, {choice: [cosines[choice], *(float((mask & side).sum() / mask.sum())
                                                       for side in ((A == 0)[:, None], right, first)),
                                    float(-rollout.logprobs[mask].mean())] for choice, mask in kept.items()}


def why(flags, seeds=(5, 6)):
    """What each score would keep of the policies that runs of two seeds a domain start from; or with flags of train.py
    of the policy that such a run starts from, a pretrained one with --model."""
    configs = [train.parse(flags)] if flags else [train.Config(domain=domain, seed=(seed,), prompts=32)
                                                  for domain in train.DOMAINS for seed in seeds]
    found, example = {}, None
    for config in configs:
        run = train.prepare(config)
        if not config.model:
            train.warm_up(run)
        rollout, kept, numbers = first_batch(run)
        example = example or (rollout, kept["entropy", 0.05], kept["exact", 0.05])
        for choice, values in numbers.items():
            found.setdefault(choice, []).append(values)
    found = {choice: np.array(values) for choice, values in found.items()}                  # (start points, 5) each
    head = ("keep", "score", "cosine of its update with that of all tokens [range]", "in dead groups",
            "in right answers", "first tokens", "surprise, nats")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for name, keep in sorted(found, key=lambda choice: choice[1]):
        cosine, *rest = found[name, keep].T
        print(f"| {keep} | {name} | {cosine.mean():.2f} [{cosine.min():.2f}, {cosine.max():.2f}] | "
              + " | ".join(f"{column.mean():.2f}" for column in rest) + " |")
    if not flags:
        draw_missed(example, found)


def draw_missed(example, found):
    """assets/missed.png: on the left the tokens of one batch, on the right what an update from a few of them is."""
    from assets.pictures import COLOURS, picture, plt
    if not plt:
        return print("\nno figure: pip install matplotlib")
    (rollout, by_entropy, by_exact), (figure, (left, right)) = example, plt.subplots(1, 2, figsize=(9.6, 4.4))
    for mask, marker, colour, label in (
            (rollout.answer_mask & ~by_entropy & ~by_exact, ".", "#BBBBBB", "kept by neither"),
            (by_exact & by_entropy, "s", "black", "kept by both"),
            (by_entropy & ~by_exact, "^", COLOURS["entropy"], "kept by entropy alone"),
            (by_exact & ~by_entropy, "o", COLOURS["exact"], "kept by exact alone")):
        left.plot(rollout.entropy[mask], -rollout.logprobs[mask], marker, color=colour, ms=4, alpha=0.7, label=label)
    left.set(xlabel="entropy E of the policy (nats)", ylabel="surprise $-\\log p$ of the sampled token (nats)",
             title="math, one batch, top 5%", ylim=(0, 1.4 * left.get_ylim()[1]))
    left.legend(fontsize=9, loc="upper left")
    for name in NAMES:
        cosine = np.array([found[name, keep][:, 0] for keep in KEEPS])                      # (keeps, start points)
        colour = COLOURS.get(name, "#CC79A7")
        right.plot(KEEPS, cosine.mean(axis=1), marker="o", color=colour, label=name)
        right.fill_between(KEEPS, cosine.min(axis=1), cosine.max(axis=1), color=colour, alpha=0.12)
    right.set(xscale="log", xlabel="share of tokens kept", ylim=(None, 1.03),
              ylabel="cosine with the update of all tokens",
              title=f"{len(found['exact', 0.05])} start points (domains x seeds): mean, range")
    right.set_xticks(KEEPS, [f"{keep:g}" for keep in KEEPS])
    right.minorticks_off()
    right.legend(fontsize=9, loc="lower right")
    picture(TABLE.with_name("missed.png"), figure, "The fewer tokens, the less entropy's update is the update that all "
            "tokens would make:\nit keeps guesses of wrong answers and misses the surprising tokens of right ones")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report", "why", "again"))
    parser.add_argument("names", nargs="*", help="words that choose what to run, or the row to run again")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after so many minutes")
    parser.add_argument("--any_x86", action="store_true", help="so that every x86 CPU with AVX2 gives the same numbers")
    arguments, flags = parser.parse_known_args()
    if flags and arguments.what != "why":
        parser.error(f"unknown: {' '.join(flags)}")
    if arguments.what == "run":
        run(arguments.names, arguments.jobs, arguments.minutes, arguments.any_x86)
    elif arguments.what == "report":
        report()
    elif arguments.what == "why":
        why(flags)
    else:
        sys.exit(again(int(arguments.names[0]) if len(arguments.names) == 1 and arguments.names[0].isdecimal() else 0))


if __name__ == "__main__":
    main()

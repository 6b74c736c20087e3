"""The study: does choosing tokens by gradient magnitude help, and when?  Every run is one row of assets/study.csv.

    python assets/study.py run [PART ...] [--jobs 2]   runs what the CSV does not hold yet; stop it, go on with it
    python assets/study.py report                      the tables and assets/study.png from the CSV, in seconds
    python assets/study.py again ROW                   runs one row of the CSV once more and compares

All arms of a seed share the warm-up, the problem order, the sampling seed and the divisor.  One process per core with
one thread each.
"""
import argparse
import csv
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

# Controls that only the study needs, each one factor of "exact"; before train, which reads the names for its flags.
gmts.SELECTIONS["norm"] = lambda entropy, omega, norm: norm
gmts.SELECTIONS["omega"] = lambda entropy, omega, norm: omega.abs()
import train

TABLE = ROOT / "assets" / "study.csv"
COMMON = {"steps": 60, "prompts": 16, "group_size": 8, "lr": 3e-4, "clip_grad": 0.0, "eval_every": 60,
          "eval_samples": 16, "eval_problems": 512}
ARMS = ("all", "random", "entropy", "gmts", "exact")
FIELDS = ("part arm domain size loss keep scope lr seed status start_greedy start_avg final_greedy final_avg "
          "final_pass area steps_to_half last_reward grad_norm_median grad_norm_max entropy_final overlap_entropy "
          "kept_right dead_groups minutes commit flags").split()


def plan():
    """All runs, what tells most first: (part, arm, flags)."""
    runs = []

    def add(part, arms, domains, seeds, **flags):
        runs.extend((part, arm, {"domain": domain, "seed": (seed,), **flags})
                    for seed in seeds for domain in domains for arm in arms)

    for seed in range(5):
        for domain in train.DOMAINS:
            add("main", ARMS, (domain,), (seed,))
            add("keep", ("random", "entropy", "gmts", "exact", "norm"), (domain,), (seed,), keep=0.05)
    add("dapo", ARMS, ("math",), range(3), loss="dapo")
    add("small", ARMS, ("math",), range(3), size="small")
    add("keep", ("entropy", "gmts", "exact"), train.DOMAINS, range(3), keep=0.02)
    add("several updates", ARMS, ("math",), range(3), epochs=2, inner_batches=2)
    add("random reward", ARMS, ("math",), range(3))
    add("group scope", ARMS, ("math",), range(3), scope="group")
    add("bottom", ("entropy", "gmts"), train.DOMAINS, range(3), bottom=True, keep=0.8)
    add("lr", ARMS, train.DOMAINS, range(3), lr=1e-3)
    add("lr", ARMS, train.DOMAINS, range(3), lr=1e-4)
    add("main", ("norm", "omega"), train.DOMAINS, range(5))
    add("keep", ("omega",), train.DOMAINS, range(5), keep=0.05)
    for keep in (0.1, 0.5, 0.02):
        add("keep", ("random", "entropy", "gmts", "exact", "norm", "omega"), train.DOMAINS, range(5), keep=keep)
    add("small", ARMS, ("code", "logic"), range(3), size="small")
    add("base", ARMS, ("math",), (0,), size="base")
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


def warm_up(flags):
    """Make the warm-up that all runs of one domain, size and seed start from, unless it is there."""
    torch.set_num_threads(1)
    train.warm_up(train.prepare(train.Config(**flags)))


def run_one(part, arm, flags):
    """Train one arm; returns its row.  A run that breaks is a row too."""
    torch.set_num_threads(1)
    train.say = lambda text: None
    started = time.time()
    row = {"part": part, "arm": arm, "flags": key(part, arm, flags)[2], "status": "ok"}
    with tempfile.TemporaryDirectory() as folder:
        config = train.Config(**flags, out=f"{folder}/run")
        row |= {name: getattr(config, name) for name in ("domain", "size", "loss", "keep", "scope", "lr")}
        row["seed"] = config.seed[0]
        if part == "random reward":
            random_rewards(config.seed[0])
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
            "final_avg": last[avg], "final_pass": last[pass_k], "area": float(reward.mean()),
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


def commit():
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()


def run(parts, jobs, minutes):
    """Run what is missing, `jobs` at a time, starting none after `minutes`; a row is written as soon as it is there."""
    done = {(r["part"], r["arm"], r["flags"]) for r in read_table()}
    todo = [(p, a, flags_of(a, f)) for p, a, f in plan() if not parts or p in parts]
    todo = [t for t in todo if key(*t) not in done]
    print(f"{len(todo)} runs to do, {len(done)} done", flush=True)
    deadline, version, running, started, warm = time.time() + 60 * minutes, commit(), {}, set(), set()
    # max_tasks_per_child: a fresh process for each run, so that nothing of one (a patched reward) reaches the next.
    spawn = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, max_tasks_per_child=1, mp_context=spawn) as pool:

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
    old = read_table()[number - 1]
    part, arm, flags = next((p, a, flags_of(a, f)) for p, a, f in plan()
                            if key(p, a, flags_of(a, f)) == (old["part"], old["arm"], old["flags"]))
    new = run_one(part, arm, flags)
    changed = [n for n in FIELDS if n not in ("minutes", "commit") and old[n] != str(new.get(n, ""))]
    print(f"row {number}, {arm}: " + (f"differs in {', '.join(changed)}" if changed else "the same numbers again"))
    return bool(changed)


def interval(values, resamples=4000):
    """Mean of values and its 95% interval, by drawing seeds with replacement."""
    values = np.array(values)
    draws = values[np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))].mean(axis=1)
    return values.mean(), *np.quantile(draws, (0.025, 0.975))


def report():
    """Print, for each setting, every arm's accuracy, and its paired differences to entropy and to all."""
    settings = {}
    for row in read_table():
        name = tuple(row[n] for n in ("part", "domain", "size", "loss", "lr", "scope"))
        keep = row["keep"] if row["part"] == "keep" else "0.2"
        settings.setdefault((*name, keep), {}).setdefault(row["arm"], {})[int(row["seed"])] = row
    for setting, arms in settings.items():
        print("\n" + ", ".join(setting[:-1]) + f", keep {setting[-1]}")
        print(f"{'arm':16}{'seeds':>6}{'greedy':>8}{'avg@16':>8}{'area':>8}{'collapsed':>10}"
              "   avg@16 minus that of entropy, of all")
        for arm, seeds in arms.items():
            numbers = [np.mean([float(r[n]) for r in seeds.values()])
                       for n in ("final_greedy", "final_avg", "area_reward")]
            broken = sum(r["status"] != "ok" for r in seeds.values())
            line = f"{arm:16}{len(seeds):6}" + "".join(f"{x:8.3f}" for x in numbers) + f"{broken:10}   "
            for other in ("entropy", "all"):
                common = sorted(seeds.keys() & arms.get(other, {}).keys())
                if arm != other and len(common) > 1:
                    gaps = [float(seeds[s]["final_avg"]) - float(arms[other][s]["final_avg"]) for s in common]
                    mean, low, high = interval(gaps)
                    needed = math.ceil((2.8 * np.std(gaps, ddof=1) / 0.01) ** 2)    # 80% power, 5% level, 1 point
                    line += f"{mean:+.3f} [{low:+.3f}, {high:+.3f}] ({needed} seeds for 1 point)  "
            print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report", "again"))
    parser.add_argument("names", nargs="*", help="parts to run, or the row to run again")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf)
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.names, arguments.jobs, arguments.minutes)
    elif arguments.what == "report":
        report()
    else:
        sys.exit(again(int(arguments.names[0])))


if __name__ == "__main__":
    main()

"""The README's pictures: `python assets/pictures.py RUN [--comparison DIR] --out assets/` (pip install matplotlib).

RUN is a folder that train.py wrote; DIR is that of a comparison, with a folder per selection and seed.
"""
import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from gmts import group_advantages, measure, select_tokens, spearman, token_scores

try:
    import matplotlib
except ImportError:
    sys.exit("the pictures need matplotlib: pip install matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's colours, told apart by colour-blind readers too; each selection keeps its own in every picture.
COLOURS = {"gmts": "#D55E00", "entropy": "#0072B2", "exact": "#009E73", "random": "#999999", "all": "#000000"}
RIGHT, WRONG = "#0072B2", "#D55E00"
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
                     "figure.constrained_layout.use": True, "axes.titlesize": 11, "figure.titlesize": 12})


def picture(path, figure, sentence):
    """Write a figure under the sentence that says what to see."""
    figure.suptitle(sentence)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"{path}: {path.stat().st_size // 1024} KB.  {sentence}")


def proposition(path, rollout):
    """Proposition 3.1: logit-gradient norm against entropy, both on log axes, over every sampled token."""
    live = rollout.answer_mask
    E, norm, p = rollout.entropy[live], rollout.logit_grad_norm[live], rollout.logprobs[live].exp()   # (N,) each
    rare = (p < 0.5) & (E < 0.5)                                  # sampled against a policy that was nearly certain
    figure, axes = plt.subplots(figsize=(8.3, 4.6))
    axes.loglog(E[~rare], norm[~rare], ".", ms=3, alpha=0.5, color=COLOURS["entropy"], label="sampled token")
    axes.loglog(E[rare], norm[rare], "^", ms=7, color=COLOURS["gmts"], label="rare token of a confident policy")
    eps = torch.logspace(-8, -0.3, 200, dtype=torch.double)      # the likely side of a coin that falls so with 1 - eps
    axes.loglog(-eps * eps.log() - (1 - eps) * torch.log1p(-eps), 2 ** 0.5 * eps, "-", color="black", lw=1,
                label="theory: two tokens, $1-p_y=\\epsilon \\to 0$")
    axes.set(xlabel="entropy E (nats)", ylabel="$\\|\\nabla_z \\log p_y\\|$", xlim=(1e-6, 3), ylim=(5e-8, 3))
    axes.legend(loc="lower right")
    picture(path, figure, "Where the policy is certain the gradient shrinks as the entropy does;\n"
                          "a rare token (triangles) has a large gradient that its entropy does not see")


def scatter(path, rollout, advantages, omega, norms):
    """True gradient norm of each token's objective against E, and against |E * omega|, coloured by |A|."""
    live = rollout.answer_mask & (omega != 0)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.3, 4.4), sharey=True)
    for axes, score, label in ((left, rollout.entropy, "E"), (right, rollout.entropy * omega.abs(), "|E $\\omega$|")):
        x, y, top = score[live], norms[live], select_tokens(score, live, 0.2)[live]
        dots = axes.scatter(x, y, c=omega.abs()[live], s=5, cmap="viridis_r", norm="log")
        axes.axvline(float(x[top].min()), color="black", lw=1, ls="--")
        axes.set(xscale="log", yscale="log", xlim=(1e-5, 8), ylim=(float(y.quantile(0.02)), 2 * float(y.max())))
        axes.set(xlabel=label, title=f"rank correlation {spearman(x, y):.3f}; among the\n"
                                     f"top 20%, right of the line, {spearman(x[top], y[top]):.3f}")
    left.set_ylabel("true gradient norm of the objective")
    levels = {f"{a:.2f}": a for a in advantages.abs().tolist() if a}
    figure.colorbar(dots, ax=right, label="|A|", ticks=list(levels.values()), format="%.2f").minorticks_off()
    picture(path, figure, "Entropy cannot see the advantage: one stripe per |A|.\n"
                          "Times omega, the stripes fall together")


def slots(path, run, groups):
    """Share of the tokens that GMTS keeps in right and in wrong answers, by the pass rate of their group."""
    G, draw = run.config.group_size, torch.Generator(run.device).manual_seed(1)
    rollout, _, rewards = run.grade(run.next_problems(groups), G, run.config.temperature, draw)
    A, E = group_advantages(rewards).flatten(), rollout.entropy   # (B,), (B, T)
    live = rollout.answer_mask & (A != 0)[:, None]                # (B, T)
    scores = token_scores("gmts", E, A[:, None])                  # (B, T)
    kept = select_tokens(scores, live, 0.2)                       # (B, T)
    threshold, entropies = float(scores[kept].min()), E[live]
    rate = rewards.mean(dim=1).repeat_interleave(G)               # (B,)
    p = torch.linspace(0.02, 0.98, 97)
    figure, axes = plt.subplots(figsize=(8.3, 4.2))
    for name, colour, marker, among, size in (("right", RIGHT, "o", A > 0, ((1 - p) / p).sqrt()),
                                              ("wrong", WRONG, "s", A < 0, (p / (1 - p)).sqrt())):
        expected = [float((entropies * a >= threshold).float().mean()) for a in size]
        axes.plot(p, expected, color=colour, label=f"{name} answers: theory, |A| = "
                  + ("$\\sqrt{(1-p)/p}$" if name == "right" else "$\\sqrt{p/(1-p)}$"))
        for value in rate[among].unique():
            rows = among & (rate == value)
            axes.scatter(value, kept[rows].sum() / live[rows].sum(), color=colour, marker=marker, zorder=3,
                         s=20 + 8 * int(rows.sum()) ** 0.5, alpha=0.8, edgecolor="white")
    axes.axhline(0.2, color="black", lw=1, ls="--", label="20%, if all answers were treated alike")
    axes.set(xlabel="pass rate p of the group (dots: measured; larger, more answers)", ylabel="share of tokens kept")
    axes.set(xlim=(0, 1), ylim=(0, None))
    axes.legend(loc="upper center", fontsize=10)
    picture(path, figure, "GMTS gives its slots to the rarer outcome:\n"
                          "to right answers of hard problems, to wrong answers of easy ones")


def curves(path, folder):
    """Held-out greedy accuracy of every selection of a comparison: mean over seeds, and their whole range as a band."""
    runs = defaultdict(lambda: defaultdict(list))                 # selection -> step -> accuracy of each seed
    for file in sorted(folder.glob("*-*/metrics.csv")):
        for row in csv.DictReader(file.open(encoding="utf-8")):
            if row["eval_greedy"]:
                runs[file.parent.name.rsplit("-", 1)[0]][int(row["step"])].append(float(row["eval_greedy"]))
    if not runs:
        sys.exit(f"{folder} holds no <selection>-<seed>/metrics.csv with an evaluation")
    figure, axes = plt.subplots(figsize=(8.3, 4.4))
    for i, (name, points) in enumerate(runs.items()):
        steps, seeds = zip(*sorted(points.items()))
        colour = COLOURS.get(name, f"C{i}")
        axes.plot(steps, [sum(s) / len(s) for s in seeds], color=colour, marker="osD^v"[i % 5], ms=4,
                  label=f"{name} ({len(seeds[0])} seeds)")
        axes.fill_between(steps, list(map(min, seeds)), list(map(max, seeds)), color=colour, alpha=0.15, lw=0)
    axes.set(xlabel="step of reinforcement", ylabel="greedy accuracy on held-out problems")
    axes.legend()
    picture(path, figure, "What the choice of tokens is worth: mean over seeds, band from the worst seed to the best")


def main():
    """Draw all pictures that the arguments allow."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--comparison", type=Path, help="folder of a comparison, for the learning curves")
    parser.add_argument("--out", type=Path, default=Path("assets"), help="where the PNG files go")
    parser.add_argument("--groups", type=int, default=96, help="groups that are sampled for the picture of the slots")
    arguments = parser.parse_args()
    try:
        run = train.load_run(arguments.run)
    except (OSError, ValueError) as error:
        sys.exit(f"pictures.py: {error}")
    rollout, _, advantages, omega, norms = measure(run)
    arguments.out.mkdir(parents=True, exist_ok=True)
    proposition(arguments.out / "proposition.png", rollout)
    scatter(arguments.out / "scatter.png", rollout, advantages, omega, norms)
    slots(arguments.out / "slots.png", run, arguments.groups)
    if arguments.comparison:
        curves(arguments.out / "curves.png", arguments.comparison)


if __name__ == "__main__":
    main()

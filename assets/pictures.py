"""Pictures of a run: train.py draws curves.png and tokens.html into its folder, and this command the README's:

    python assets/pictures.py RUN [--comparison DIR] --out assets/

RUN is a folder that train.py wrote; DIR is that of a comparison, with a folder per selection and seed.  The PNG files
need matplotlib (pip install matplotlib), tokens.html needs nothing.
"""
import argparse
import csv
import json
import sys
from collections import defaultdict
from html import escape
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from gmts import group_advantages, measure, select_tokens, spearman, token_scores

try:
    import matplotlib
except ImportError:
    plt = None
else:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
                         "figure.constrained_layout.use": True, "axes.titlesize": 11, "figure.titlesize": 12})

# Okabe and Ito's colours, told apart by colour-blind readers too; each selection keeps its own in every picture.
COLOURS = {"gmts": "#D55E00", "entropy": "#0072B2", "exact": "#009E73", "random": "#999999", "all": "#000000"}
RIGHT, WRONG = "#0072B2", "#D55E00"


def picture(path, figure, sentence):
    """Write a figure under the sentence that says what to see."""
    figure.suptitle(sentence)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    train.say(f"{path}: {sentence}")


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
    axes.set(xlabel="pass rate p of the group (dots: measured; larger, more answers)")
    axes.set_ylabel("share of tokens kept, of those in live groups")
    axes.set(xlim=(0, 1), ylim=(0, None))
    axes.legend(loc="upper center", fontsize=10)
    picture(path, figure, "GMTS gives its slots to the rarer outcome:\n"
                          "to right answers of hard problems, to wrong answers of easy ones")


def band(axes, folder, column):
    """Draw one column of metrics.csv against the step: mean over the seeds of each selection, whole range as a band."""
    runs = defaultdict(lambda: defaultdict(list))                 # selection -> step -> value of each seed
    single = folder / "metrics.csv"
    for file in [single] if single.exists() else sorted(folder.glob("*-*/metrics.csv")):
        name = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))["select"][0]
        for row in csv.DictReader(file.open(encoding="utf-8")):
            if row[column]:
                runs[name][int(row["step"])].append(float(row[column]))
    for i, (name, points) in enumerate(runs.items()):
        steps, seeds = zip(*sorted(points.items()))
        label, colour = f"{name} ({len(seeds[0])} seeds)" if seeds[0][1:] else name, COLOURS.get(name, f"C{i}")
        marker = "osD^v"[i % 5] if len(steps) < 15 else ""
        axes.plot(steps, [sum(s) / len(s) for s in seeds], color=colour, label=label, marker=marker, ms=4)
        axes.fill_between(steps, list(map(min, seeds)), list(map(max, seeds)), color=colour, alpha=0.15, lw=0)
    axes.set(xlabel="step of reinforcement")


def learning(path, folder):
    """Held-out greedy accuracy of every selection of a comparison."""
    figure, axes = plt.subplots(figsize=(8.3, 4.4))
    band(axes, folder, "eval_greedy")
    axes.set(ylabel="greedy accuracy on held-out problems")
    axes.legend()
    picture(path, figure, "What the choice of tokens is worth: mean over seeds, band from the worst seed to the best")


def curves(path, folder):
    """A run, or all runs of a comparison, at a glance."""
    figure, grid = plt.subplots(2, 3, figsize=(11, 5.6))
    for axes, (column, title) in zip(grid.flat, (
            ("eval_greedy", "greedy accuracy, held-out"), ("reward", "mean reward of the samples"),
            ("length", "length of the answers, tokens"), ("entropy", "entropy, nats per token"),
            ("grad_norm", "gradient norm, before clipping"), ("overlap_entropy", "kept also by entropy"))):
        band(axes, folder, column)
        axes.set_title(title)
    grid[0, 0].legend()
    picture(path, figure, f"{ascii(folder.name)[1:-1]}: is it learning, and is anything collapsing?")


PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Which tokens are trained on</title>
<style>
:root { color-scheme: light dark; --ets: #0072b2; --gmts: #d55e00; --line: #8886; --rgb: 240, 180, 30 }
@media (prefers-color-scheme: dark) { :root { --ets: #56b4e9; --gmts: #ff8c3a; --rgb: 200, 140, 0 } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 1rem auto; padding: 0 1rem }
header { position: sticky; top: 0; background: Canvas; border-bottom: 1px solid var(--line); padding: .5rem 0 }
label { margin-right: 1rem } h2 { font-size: 1rem; margin: 2rem 0 .5rem; white-space: pre-wrap }
section { border-left: 4px solid var(--line); padding-left: .8rem; margin: .8rem 0; break-inside: avoid }
section.right { border-left-style: double; border-left-width: 8px } small { font-size: .85rem; opacity: .8 }
div { font: 15px/2.1 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
span, b { padding: 2px 0; border-bottom: 4px solid transparent }
span { background: rgba(var(--rgb), var(--v, 0)) } span + span { margin-left: 1px }
b { font-weight: normal; padding: 0 .4em }
.ets { border-bottom: 4px dotted var(--ets) } .gmts { border-bottom: 4px solid var(--gmts) }
.both { border-bottom: 4px double currentColor }
#entropy:checked ~ main span { --v: var(--e) } #gmts:checked ~ main span { --v: var(--g) }
#norm:checked ~ main span { --v: var(--n) } body > input { position: absolute; opacity: 0 } label { cursor: pointer }
#entropy:checked ~ header [for=entropy], #gmts:checked ~ header [for=gmts], #norm:checked ~ header [for=norm] {
  font-weight: bold; text-decoration: underline }
body > input:focus-visible ~ header { outline: 2px solid var(--ets) }
@media print { header { position: static } span, b { print-color-adjust: exact; -webkit-print-color-adjust: exact } }
</style>
<body><input type="radio" name="shade" id="entropy"><input type="radio" name="shade" id="gmts" checked>
<input type="radio" name="shade" id="norm">
<header>Shade tokens by: <label for="entropy">entropy E</label><label for="gmts">GMTS score |E&omega;|</label>
<label for="norm">exact gradient norm</label><br>Kept by <b class="ets">entropy alone</b>
<b class="gmts">GMTS alone</b> <b class="both">both</b> <small>Point at a token for its numbers.</small></header><main>
"""


def tokens_page(groups):
    """One self-contained HTML page: every token shaded by what it is worth, and underlined by who keeps it.

    groups: list of (question, answers); an answer is (reward, advantage, tokens); a token is (text, entropy, gmts
    score, exact norm, kept by entropy, kept by GMTS).  A shade is the root of the value's share of the largest one on
    the page, so that the many small values show.
    """
    tokens = [token for _, answers in groups for *_, answer in answers for token in answer]
    largest = [max((token[i] for token in tokens), default=0) or 1 for i in (1, 2, 3)]
    parts = [PAGE]
    for question, answers in groups:
        parts.append(f"<h2>{escape(question)}</h2>\n")
        for reward, advantage, answer in answers:
            slots = [sum(token[i] for token in answer) for i in (4, 5)]
            outcome = "right" if reward > 0 else "wrong"
            parts.append(f'<section class="{outcome}"><small>{outcome}: reward {reward:g}, advantage {advantage:+.2f}; '
                         f"of {len(answer)} tokens entropy keeps {slots[0]}, GMTS {slots[1]}</small>\n<div>")
            for text, entropy, score, norm, by_entropy, by_gmts in answer:
                kept = ("", "ets", "gmts", "both")[by_entropy + 2 * by_gmts]
                shades = ";".join(f"--{name}:{0.8 * (value / top) ** 0.5:.2f}" for name, value, top in
                                  zip("egn", (entropy, score, norm), largest))
                hover = f"{text!r}: entropy {entropy:.3f}, GMTS score {score:.3f}, exact norm {norm:.3f}"
                shown = escape(text).replace("\n", "&crarr;\n")
                parts.append(f'<span class="{kept}" style="{shades}" title="{escape(hover)}">{shown}</span>')
            parts.append("</div></section>\n")
    return "".join(parts) + "</main></body></html>\n"


def tokens(path, run, groups=3):
    """tokens.html: answers to the next training problems and all their numbers; live groups first, then a dead one."""
    position, G = run.position, run.config.group_size
    rollout, rewards, A, omega, norms = measure(run)
    run.position = position
    problems = run.next_problems(run.config.prompts)
    run.position = position
    score = (rollout.entropy * omega).abs()                       # (B, T)
    kept = [select_tokens(s, rollout.answer_mask, run.config.keep, run.config.scope, G)
            for s in (rollout.entropy, score)]                    # (B, T) each
    columns = (rollout.tokens, rollout.entropy, score, norms, *kept)
    dead = [bool(A[i * G] == 0) for i in range(len(problems))]
    chosen = [i for i, d in enumerate(dead) if not d][:groups] + [i for i, d in enumerate(dead) if d][:1]
    page = []
    for i in chosen:
        answers = []
        for row in range(i * G, i * G + G):
            table = zip(*(c[row][rollout.answer_mask[row]].tolist() for c in columns))
            answers.append((float(rewards.flatten()[row]), float(A[row]),
                            [(run.tokenizer.decode([token]), *numbers) for token, *numbers in table]))
        page.append((problems[i].question, answers))
    path.write_text(tokens_page(page), encoding="utf-8")


def draw_run(folder):
    """What train.py leaves in a run's folder beside its numbers: curves.png, and for a single run tokens.html."""
    if plt:
        curves(folder / "curves.png", folder)
    else:
        train.say("no curves.png: pip install matplotlib")
    if (folder / "checkpoint.pt").exists():
        if (folder / "checkpoint.pt").stat().st_size < 3e7:                 # 2.5 million weights with AdamW's state
            tokens(folder / "tokens.html", train.load_run(folder))
        else:           # the exact norms need a copy of the text before it for every token
            train.say("no tokens.html of so large a model, as it takes long: "
                      f"python assets/pictures.py {folder} --out {folder}")


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
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"pictures.py: {error}")
    tokens(arguments.out / "tokens.html", run)
    if not plt:
        sys.exit("the other pictures need matplotlib: pip install matplotlib")
    rollout, _, advantages, omega, norms = measure(run)
    proposition(arguments.out / "proposition.png", rollout)
    scatter(arguments.out / "scatter.png", rollout, advantages, omega, norms)
    slots(arguments.out / "slots.png", run, arguments.groups)
    if arguments.comparison:
        learning(arguments.out / "curves.png", arguments.comparison)


if __name__ == "__main__":
    main()

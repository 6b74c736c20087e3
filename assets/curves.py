"""The learning curves that train.py draws at the end of a run (matplotlib is optional)."""
from matplotlib.figure import Figure

METRICS = {"eval_greedy": "greedy accuracy, held out", "reward": "reward", "entropy": "entropy (nats)",
           "grad_norm": "gradient norm before clipping"}


def draw(path, curves):
    """Write curves {selection: [rows of metrics.csv of each seed]} as a picture: a colour for each selection."""
    figure = Figure(figsize=(16, 3.5), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(METRICS)), METRICS):
        for number, name in enumerate(curves):
            for rows in curves[name]:
                points = [(row["step"], row[metric]) for row in rows if metric in row]
                axes.plot(*zip(*points), color=f"C{number}", label=name if rows is curves[name][0] else None)
        axes.set(title=METRICS[metric], xlabel="step")
        axes.legend()
    figure.savefig(path, dpi=110)

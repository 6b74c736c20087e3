"""Train a GPT on a verifier's reward alone: sample, verify, weigh, score, select, update.

`warm_up` shows a small GPT worked examples.  `reinforce` is the method: GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783)
or DAPO (2503.14476) on the 20% of tokens that GMTS (2608.30632) selects.  The rest gets them going and compares.

Shapes: P prompts, G answers per prompt, B = P * G answers, T padded length, N tokens trained on, V vocabulary.
"""
import argparse
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

from gmts import SELECTIONS, group_advantages, learning_coefficient, loss_weights, policy_objective, select_tokens
from gmts import token_scores
from model import GPT, SIZES, byte_tokenizer, load_pretrained
from rollout import Rollout, budgets, generate, micro_batches, pass_at_k, score, token_logits
from verify import DOMAINS, extract_answer, load_problems, make_problems, reward

# Warm-up: worked examples of each level, at the end mostly bare answers.  Reinforcement: levels to learn on.
Task = namedtuple("Task", "warmup levels warmup_steps")
TASKS = {"math": Task({1: 400, 2: 6000, 3: 9000, 4: 1200}, (2, 3, 4, 5), 3600),
         "code": Task({1: 1000, 2: 6000, 3: 9000, 4: 1200}, (2, 3, 4, 5), 4500),
         "logic": Task({1: 6000, 2: 9000, 3: 9000, 4: 1200}, (2, 3, 4), 7500)}
ASK = "{question}\nThink step by step and end with #### and the answer."
TEMPLATES = {"bytes": "<|question|>{question}<|answer|>", "base": f"Question: {ASK}\nAnswer:",
             "chat": f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n"}
FORMAT = 1                          # of checkpoint.pt; a file of another format is refused
MAY_CHANGE = {"steps", "device", "out", "resume"}               # of a configuration, when a run goes on
COUNTERS = ("step", "position", "rows", "samples", "warned")    # of a Run, kept in checkpoint.pt
GENERATORS = ("sampler", "selector")                            # the one draws answers, the other the "random" scores
WARMUP_FOLDER, WARMUP_BATCH, WARMUP_LR = Path("out/warmup"), 16, {"tiny": 3e-3, "small": 3e-3, "base": 1e-3}
TRAIN_PROBLEMS = 400                # per level; a run starts over when it has seen them all
MAX_ROUNDS = 5                      # how often dapo samples anew in search of live groups
ACCELERATOR = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
METRICS = ("step reward pass_rate dead_groups truncated no_answer length length_right length_wrong entropy "
           "entropy_kept kept_share overlap_entropy kept_right ratio_max clip_share kl grad_norm lr tokens_per_s "
           "rollout_s score_s update_s eval_greedy eval_avg@{n} eval_pass@{k}")


def option(default, text, *allowed):
    """A field of Config: its default, its help text, and what it allows: names, or the least and greatest number."""
    number = len(allowed) and type(allowed[0])
    words = f"{number.__name__} from {allowed[0]} to {allowed[1]}" if number not in (0, str) else ", ".join(allowed)
    text += f" ({words}; default {default[0] if type(default) is tuple else default})" * bool(words)
    return field(default=default, metadata={"help": text, "allowed": words, "check": lambda value: (
        value in (allowed or [value]) if number in (0, str) else allowed[0] <= value <= allowed[1])})


@dataclass
class Config:
    """Everything that a run depends on; every field is a flag of the same name.  ValueError for what cannot work."""
    domain: str = option("math", "synthetic problems to learn", *DOMAINS)
    level: int = option(0, "length of the problems; 0 mixes the domain's own", 0, 8)
    size: str = option("tiny", "size of a model that starts from random weights", *SIZES)
    select: tuple = option(("gmts",), "how tokens are chosen; several compare", "random", *SELECTIONS)
    keep: float = option(0.2, "share of the sampled tokens that is trained on", 1e-6, 1)
    scope: str = option("batch", "within what that share is counted", "batch", "group", "answer")
    bottom: bool = option(False, "keep the lowest scores instead, as a control")
    loss: str = option("grpo", "objective; dapo samples until no group is dead", "grpo", "dapo", "dr_grpo")
    clip_low: float = option(0.2, "lower clip of the ratio", 0.0, 1)
    clip_high: float = option(0.28, "upper clip of the ratio", 0.0, math.inf)
    beta: float = option(0.0, "weight of the KL term towards the model at the start", 0.0, 1000)
    prompts: int = option(16, "prompts per step", 1, math.inf)
    group_size: int = option(8, "answers per prompt", 2, math.inf)
    steps: int = option(60, "steps of reinforcement", 1, math.inf)
    inner_batches: int = option(1, "slices of a step's answers, one optimizer step each", 1, math.inf)
    epochs: int = option(1, "passes over a step's answers", 1, math.inf)
    lr: float = option(3e-4, "learning rate of reinforcement", 1e-9, 1)
    clip_grad: float = option(1.0, "largest gradient norm; 0 does not clip", 0.0, math.inf)
    temperature: float = option(1.0, "sampling temperature", 0.01, 100)
    top_p: float = option(1.0, "sample from the likeliest tokens that hold this probability", 1e-6, 1)
    max_new_tokens: int = option(96, "longest answer, in tokens", 1, math.inf)
    seed: tuple = option((0,), "random seed; several compare", 0, 2 ** 32 - 1)
    device: str = option("auto", "where to compute", *dict.fromkeys(("auto", "cpu", ACCELERATOR)))
    dtype: str = option("auto", "of matrix products; weights stay float32", "auto", "float32", "bfloat16")
    compile: bool = option(False, "run decoding and training through torch.compile")
    out: str = option("", "the run's folder; empty takes a free name under out/")
    resume: bool = option(False, "go on with the run in --out, or with the newest one")
    model: str = option("", "Hugging Face model folder to start from, instead of a warm-up")
    data: str = option("", "JSON Lines file with problems to train on")
    eval_data: str = option("", "JSON Lines file with held-out problems")
    template: str = option("", "prompt around {question}; special tokens may stand only here")
    eval_every: int = option(10, "steps between evaluations", 1, math.inf)
    eval_samples: int = option(8, "answers per held-out problem", 1, math.inf)
    eval_problems: int = option(256, "held-out problems", 1, math.inf)

    def __post_init__(self):
        def require(name, condition, allowed):
            if not condition:
                raise ValueError(f"--{name} {getattr(self, name)}: allowed is {allowed}")
        for f in fields(self):      # texts of a command line and lists of a JSON file become what the field holds
            kind, given = type(f.default[0] if f.type is tuple else f.default), getattr(self, f.name)
            given = tuple(given) if f.type is tuple else (given,)
            try:
                valid = tuple(value for value in map(kind, given) if f.metadata["check"](value))
            except ValueError:
                valid = ()
            require(f.name, valid and len({*valid}) == len(given), f.metadata["allowed"] + (f.type is tuple) * ", once")
            setattr(self, f.name, valid if f.type is tuple else valid[0])
        for name, is_there in (("data", os.path.isfile), ("eval_data", os.path.isfile), ("model", os.path.isdir)):
            require(name, not (at := getattr(self, name)) or is_there(at), "a file that exists, a folder for --model")
        require("data", bool(self.data) == bool(self.eval_data), "a file together with --eval_data, or neither")
        require("inner_batches", self.prompts % self.inner_batches == 0, "a divisor of --prompts")
        require("epochs", self.epochs == 1 or self.loss != "dapo", "1 with dapo, which samples afresh for each pass")
        require("beta", self.beta == 0 or self.loss != "dapo", "0 with dapo, which has no KL term")
        require("template", self.template.count("{question}") == bool(self.template), "a text with one {question}")

    def continues(self, began):
        """ValueError if this is another run than the one that `began` with these values, but for what may change."""
        for name, value in asdict(self).items():
            if name not in MAY_CHANGE and value != began.get(name):
                raise ValueError(f"--{name} {value}: the run began with {began.get(name)}")


def columns(config):
    return METRICS.format(n=config.eval_samples, k=min(8, config.eval_samples)).split()


def say(text):
    """Print a line past the progress bar; a reader who closed the pipe (`| head`) does not end the run."""
    try:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


class Run:
    """A model, its problems, and everything that changes while it learns."""
    def __init__(self, config, model, tokenizer, template):
        self.config, self.model, self.tokenizer, self.template = config, model, tokenizer, template
        self.folder, self.device = Path(config.out), model.embed.weight.device
        self.forward = torch.compile(model, dynamic=True) if config.compile else model
        self.sampler, self.selector = (torch.Generator(self.device).manual_seed(config.seed[0]) for _ in GENERATORS)
        self.optimizer = torch.optim.AdamW(model.parameters(), config.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.learned = {"model": model, "optimizer": self.optimizer}
        if config.beta:             # the KL term holds the policy near the one that reinforcement starts from
            self.reference = self.learned["reference"] = GPT(model.config).to(self.device).requires_grad_(False)
        low = config.dtype == "bfloat16" or config.dtype == "auto" and self.device.type == "cuda"
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=low)   # of matrix products alone
        self.step, self.position, self.rows, self.samples, self.warned = 0, 0, [], [], []

    def encode(self, question):
        """Token ids of the prompt.  Special tokens come from the template alone: in a question they are plain text."""
        before, after = (self.tokenizer.encode(s, allowed_special="all") for s in self.template.split("{question}"))
        return before + self.tokenizer.encode_ordinary(question) + after

    def next_problems(self, n):
        """The next n training problems; their order depends on the seed alone and is another in each pass."""
        first, size = self.position, len(self.problems)
        order = [p for i in range(first // size, (first + n - 1) // size + 1)
                 for p in random.Random(f"{self.config.seed[0]}/{i}").sample(self.problems, size)]
        self.position += n
        return order[first % size:][:n]

    def grade(self, problems, samples, temperature, generator):
        """Sample answers and verify them: Rollout of B rows, B texts, rewards (P, G)."""
        c, prompts = self.config, [self.encode(p.question) for p in problems]
        n = max(1, budgets(self.model, max(map(len, prompts)) + c.max_new_tokens)[0] // samples)    # prompts at once
        how = samples, c.max_new_tokens, self.model.config.eos_token_ids, temperature, c.top_p, generator, self.forward
        with self.autocast:
            rollout = Rollout.join([generate(self.model, prompts[i:i + n], *how) for i in range(0, len(prompts), n)])
        texts = [self.tokenizer.decode(ids) for ids in rollout.answers()]
        rewards = [reward(text, problems[i // samples].answer) for i, text in enumerate(texts)]
        return rollout, texts, torch.tensor(rewards, device=self.device).view(-1, samples)

    def save(self):
        """Write checkpoint.pt, all that a bit-for-bit continuation needs."""
        write_whole(self.folder / "checkpoint.pt", lambda file: torch.save({
            "format": FORMAT, "config": asdict(self.config), **{name: getattr(self, name) for name in COUNTERS},
            **{name: part.state_dict() for name, part in self.learned.items()},
            **{name: getattr(self, name).get_state() for name in GENERATORS}}, file))

    def restore(self):
        """Go back to checkpoint.pt.  ValueError if it cannot be read or is of another run."""
        state = read_checkpoint(self.folder / "checkpoint.pt")
        self.config.continues(state.get("config", {}))
        for name, part in self.learned.items():
            part.load_state_dict(state[name])
        for own, saved in ((getattr(self, name), state[name]) for name in GENERATORS):
            own.set_state(saved if saved.shape == own.get_state().shape else own.get_state())   # else: another device's
        vars(self).update({name: state[name] for name in COUNTERS})


def write_whole(path, content):
    """Write text, or what a function puts into a file, beside `path` and rename it: `path` is whole at every moment."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(part, "wb") as file:
            content(file) if callable(content) else file.write(content.encode())
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
    c, device = config, ACCELERATOR if config.device == "auto" else config.device
    if c.data:
        problems, held_out = load_problems(c.data), load_problems(c.eval_data)
    else:
        problems, held_out = ([p for level in ((c.level,) if c.level else TASKS[c.domain].levels)
                               for p in make_problems(c.domain, level, n, seed, side)]
                              for n, seed, side in ((TRAIN_PROBLEMS, c.seed[0], False), (c.eval_problems, 0, True)))
    torch.manual_seed(c.seed[0])
    held_out = random.Random("held out").sample(held_out, min(c.eval_problems, len(held_out)))
    model, tokenizer = load_pretrained(c.model, device, torch.float32) if c.model else (
        GPT(SIZES[c.size]).to(device), byte_tokenizer())
    ends = {t for t in tokenizer.special_tokens_set if tokenizer.encode_single_token(t) in model.config.eos_token_ids}
    kind = "bytes" if "<|eos|>" in ends else "chat" if "<|im_end|>" in ends else "base"
    run = Run(c, model, tokenizer, c.template or TEMPLATES[kind])
    room = model.config.max_position_embeddings - c.max_new_tokens
    run.problems, run.eval_problems = ([p for p in some if len(ask := run.encode(p.question)) <= room and (c.model or
        len(ask + tokenizer.encode_ordinary(p.solution)) < room + c.max_new_tokens)] for some in (problems, held_out))
    if not run.problems or not run.eval_problems:
        raise ValueError(f"--max_new_tokens {c.max_new_tokens}: leaves {room} tokens for a prompt, which is too few")
    if left_out := len(problems + held_out) - len(run.problems + run.eval_problems):
        say(f"{left_out} problems do not fit the context of {room + c.max_new_tokens} tokens and are left out")
    return run


def warm_up(run):
    """Teach random weights the single steps by worked solutions, then the habit of blurting an answer, as most text
    does: three of four solutions in the last fifth are bare.  The weights are kept in out/warmup/ for later runs."""
    c, model, task, order = run.config, run.model, TASKS[run.config.domain], random.Random(run.config.seed[0])
    problems = run.problems if c.data else [p for level, n in task.warmup.items()
                                            for p in make_problems(c.domain, level, n, c.seed[0])]
    eos, encode = [model.config.eos_token_ids[0]], run.tokenizer.encode_ordinary
    rows = [(run.encode(p.question), encode(p.solution) + eos, encode(f"#### {p.answer}") + eos) for p in problems]
    recipe = hashlib.sha256(repr((model.config, task, rows, c.dtype, WARMUP_LR[c.size])).encode()).hexdigest()[:8]
    path = WARMUP_FOLDER / f"{Path(c.data).stem or c.domain}-{c.size}-{c.seed[0]}-{recipe}.pt"
    if path.exists():
        return model.load_state_dict(read_checkpoint(path)["model"])
    optimizer = torch.optim.AdamW(model.parameters(), WARMUP_LR[c.size], betas=(0.9, 0.95), weight_decay=0.01)
    for step in tqdm(range(task.warmup_steps), "warm-up", disable=None):
        bare = 0.75 * (step >= 0.8 * task.warmup_steps)
        window = [(prompt + (short if order.random() < bare else worked), len(prompt))
                  for prompt, worked, short in order.sample(rows, min(len(rows), 8 * WARMUP_BATCH))]
        first = order.randrange(0, len(window), WARMUP_BATCH)       # neighbours have like lengths: little padding
        batch = sorted(window, key=lambda row: len(row[0]))[first:first + WARMUP_BATCH]
        tokens = torch.tensor([ids + [0] * (len(batch[-1][0]) - len(ids)) for ids, _ in batch], device=run.device)
        places = [(i, t) for i, (ids, start) in enumerate(batch) for t in range(start, len(ids))]
        row, column = torch.tensor(places, device=run.device).T                                         # (N,) each
        optimizer.param_groups[0]["lr"] = WARMUP_LR[c.size] * min((step + 1) / 50, 1 - step / task.warmup_steps)
        with run.autocast:
            logits = token_logits(model, tokens, row, column)                                           # (N, V)
        F.cross_entropy(logits, tokens[row, column]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: torch.save({"format": FORMAT, "model": model.state_dict()}, file))


def reinforce(run):
    """One step: sample, verify, weigh, score, select, update.  Returns the step's metrics, evaluation aside."""
    c, G, slices, ticks = run.config, run.config.group_size, [], [time.perf_counter()]
    share = 1.0 if c.select[0] == "all" else c.keep
    rollout, texts, rewards, groups = collect(run)                                              # sample, verify
    ticks.append(time.perf_counter())
    advantages = group_advantages(rewards, scale=c.loss != "dr_grpo").flatten()                 # weigh: (B,)
    with run.autocast:
        reference = score(run.reference, rollout, c.temperature)[0] if c.beta else rollout.logprobs     # (B, T)
    for number in range(c.epochs * c.inner_batches):
        chosen = groups.tensor_split(c.inner_batches)[number % c.inner_batches]                 # whole groups
        rows = (chosen[:, None] * G + torch.arange(G, device=run.device)).flatten()             # (rows,)
        batch, A, ref = rollout.take_rows(rows), advantages[rows], reference[rows]
        logprobs, entropy, norm = batch.logprobs, batch.entropy, batch.logit_grad_norm          # (rows, T) each
        if number:      # the first slice still meets the policy that sampled it: that one's record costs nothing
            with run.autocast:
                logprobs, entropy, norm = score(run.model, batch, c.temperature)
        omega = learning_coefficient(logprobs, batch.logprobs, A, c.clip_low, c.clip_high, ref, c.beta)
        scores = token_scores(c.select[0], entropy, omega, norm, run.selector)                  # score: (rows, T)
        kept = select_tokens(scores, batch.answer_mask, share, c.scope, G, c.bottom)            # select: (rows, T)
        ticks.append(time.perf_counter())
        slices.append(batch.describe_kept(kept, rewards.flatten()[rows] > 0, logprobs, entropy, A, ref, c)
                      | update(run, batch, kept, A, ref))                                       # update
        ticks.append(time.perf_counter())
    run.step += 1
    seconds = [end - start for start, end in zip(ticks, ticks[1:])]
    row = {"step": run.step, "lr": c.lr, "groups": len(groups), "first_ratio": slices[0]["ratio_max"],
           **rollout.describe(rewards), "no_answer": mean(extract_answer(text) is None for text in texts),
           "tokens_per_s": int(rollout.answer_mask.sum()) / seconds[0], "rollout_s": seconds[0],
           "score_s": sum(seconds[1::2]), "update_s": sum(seconds[2::2]),
           **{name: (max if name in ("ratio_max", "largest") else mean)(s[name] for s in slices) for name in slices[0]}}
    watch(run, row)
    return row


def collect(run):
    """Answers to the next problems: a Rollout of B rows, B texts, rewards (P, G), and the groups to train on.  dapo
    trains on live groups alone, and samples further problems until it has enough, MAX_ROUNDS times at most."""
    c, rounds, live = run.config, [], ()
    while not rounds or c.loss == "dapo" and len(live) < c.prompts and len(rounds) < MAX_ROUNDS:
        rounds.append(run.grade(run.next_problems(c.prompts), c.group_size, c.temperature, run.sampler))
        rollouts, texts, rewards = zip(*rounds)
        rewards = torch.cat(rewards)                                                            # (P, G)
        live = (rewards != rewards[:, :1]).any(dim=1).nonzero()[:, 0]                           # (live groups,)
    groups = live[:c.prompts] if c.loss == "dapo" else torch.arange(len(rewards), device=run.device)
    return Rollout.join(rollouts), sum(texts, []), rewards, groups


def update(run, batch, kept, advantages, ref_logprobs):
    """One optimizer step on the kept tokens (B, T); what follows an answer's last one costs nothing.  Returns the norm
    of the gradient before clipping and the largest ratio.  FloatingPointError, before a weight moves, if it is NaN."""
    c, model, largest = run.config, run.model, torch.zeros((), device=run.device)
    if not kept.any():      # AdamW would move the weights on a zero gradient too, by its momentum
        return {"grad_norm": 0.0, "ratio_max": 1.0}
    divisor = {"grpo": "answer", "dapo": "kept", "dr_grpo": "constant"}[c.loss]
    weights = loss_weights(kept, batch.answer_mask, divisor, c.max_new_tokens)                  # (B, T)
    for rows, T in micro_batches(kept, budgets(model)[1]):
        r, t = kept[rows, :T].nonzero(as_tuple=True)                                            # (N,) each
        i = rows[r]                                                                             # (N,) rows of the batch
        with run.autocast:
            logits = token_logits(model, batch.tokens[rows, :T], r, t, run.forward) / c.temperature     # (N, V)
        logprobs = -F.cross_entropy(logits, batch.tokens[i, t], reduction="none")               # (N,)
        old, ref = batch.logprobs[i, t], ref_logprobs[i, t]                                     # (N,) each
        objective = policy_objective(logprobs[:, None], old[:, None], advantages[i], c.clip_low, c.clip_high,
                                     ref[:, None], c.beta)[:, 0]    # (N,): each token as an answer of its own
        (weights[i, t] * objective).sum().neg().backward()
        largest = torch.maximum(largest, (logprobs.detach() - old).abs().max())
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip_grad or math.inf).item()
    if not math.isfinite(grad_norm):
        raise FloatingPointError("the gradient is not finite (NaN or inf)")
    run.optimizer.step()
    run.optimizer.zero_grad()
    return {"grad_norm": grad_norm, "ratio_max": largest.exp().item()}


def watch(run, row):
    """Warn, once each, of learning that goes wrong, and say what to try."""
    for name, wrong, text in (
        ("dead", row["dead_groups"] == 1, "all groups are dead, all right or all wrong: try another --level or --data"),
        ("few", row["groups"] < run.config.prompts, f"dapo found too few live groups in {MAX_ROUNDS} rounds"),
        ("truncated", row["truncated"] == 1, "no answer ends within --max_new_tokens: raise it, or lower --lr"),
        ("no_answer", row["no_answer"] == 1, "no answer has a result like '#### 7': see samples.txt, try a --template"),
        ("entropy", row["entropy"] < 0.005, "entropy is nearly 0, answers no longer differ: lower --lr"),
        ("stuck", row["commonest"] > 0.8, "four tokens in five are the same: the policy has collapsed; lower --lr"),
        ("largest", row["largest"] > 0.5, "one answer has more than half of the kept tokens: try --scope group"),
        ("ratio", row["step"] == 1 and row["first_ratio"] > 1.5, "the first ratio is far from 1: who sampled this?"),
    ):
        if wrong and name not in run.warned:
            run.warned.append(name)
            say(f"warning, step {run.step}: {text}")


def evaluate(run):
    """Held-out accuracy, with a generator of its own: three cells of metrics.csv; some answers go to samples.txt."""
    c, problems, generator = run.config, run.eval_problems, torch.Generator(run.device).manual_seed(0)
    _, texts, greedy = run.grade(problems, 1, 0.0, generator)
    n, right = c.eval_samples, run.grade(problems, c.eval_samples, c.temperature, generator)[2].sum(dim=1).tolist()
    accuracy = greedy.mean().item(), mean(right) / n, mean(pass_at_k(n, int(r), min(8, n)) for r in right)
    cells = dict(zip(columns(c)[-3:], accuracy))
    say(f"step {run.step:4}  " + "  ".join(f"{name[5:]} {value:.3f}" for name, value in cells.items()))
    answers = [f"{'right' if r else 'WRONG'} {p.question!r} -> {text!r}, gold {p.answer!r}"
               for r, p, text in zip(greedy[:, 0].tolist(), problems, texts)]
    run.samples += [f"--- step {run.step}", *answers[::max(1, len(answers) // 12)]]
    return cells


def write_table(path, names, rows):
    """Dicts as a CSV file; a value that is missing, such as the length of no answers, is an empty cell."""
    lines = [names, *([row.get(name, "") for name in names] for row in rows)]
    texts = (",".join(f"{x:.6g}" if isinstance(x, float) else str(x) for x in line) for line in lines)
    write_whole(path, "\n".join([*texts, ""]))


def train(config):
    """One run to its last step, from its checkpoint if it has one; returns its metrics, a dict of each step."""
    run, names, first, stop = prepare(config), columns(config), 0, []
    if config.resume and (run.folder / "checkpoint.pt").exists():
        run.restore()
        first = run.step + 1
    run.folder = claim(config)
    if config.model:
        say(budgets(run.model, config.max_new_tokens + max(len(run.encode(p.question)) for p in run.eval_problems))[2])
    elif not first:
        warm_up(run)
    if not first and config.beta:
        run.reference.load_state_dict(run.model.state_dict())
    # Ctrl-C takes effect after the step, where the state is whole; a second one at once.
    signal.signal(signal.SIGINT, lambda *_: (stop.append(1), signal.signal(signal.SIGINT, signal.default_int_handler)))
    for step in (bar := tqdm(range(first, config.steps + 1), config.select[0], disable=None)):
        evaluated = step % config.eval_every == 0 or step == config.steps
        try:
            row = (reinforce(run) if step else {"step": 0}) | (evaluate(run) if evaluated else {})
        except FloatingPointError as error:
            raise FloatingPointError(f"step {step}: {error}; {run.folder} holds the last good state") from error
        run.rows.append({name: row[name] for name in names if not math.isnan(row.get(name, math.nan))})
        write_table(run.folder / "metrics.csv", names, run.rows)
        write_whole(run.folder / "samples.txt", "\n".join([*run.samples, ""]))
        bar.set_postfix_str("  ".join(f"{k} {row[k]:.3g}" for k in ("reward", "entropy", "tokens_per_s") if step))
        if evaluated or stop:
            run.save()
        if stop:
            raise KeyboardInterrupt(f" after step {step}, which is saved")
    signal.signal(signal.SIGINT, signal.default_int_handler)    # nobody would look at `stop` any more
    return run.rows


def load_run(folder, device="cpu"):
    """The Run of a folder, with the weights of its checkpoint; ValueError, one line, if there is none."""
    saved = read_checkpoint(Path(folder) / "checkpoint.pt").get("config", {})
    run = prepare(Config(**saved | {"out": str(folder), "device": device}))
    run.restore()
    return run


def claim(config):
    """Make a run's folder, under a free name unless --out has one, with config.json in it; ValueError if that fails."""
    stem = f"out/{Path(config.model).name or config.size}-{Path(config.data).stem or config.domain}-"
    folder = Path(config.out or next(stem + str(i) for i in range(1, 10 ** 6) if not os.path.exists(stem + str(i))))
    try:
        folder.mkdir(parents=True, exist_ok=bool(config.out))
        if any(folder.iterdir()) and not config.resume:
            raise ValueError(f"--out {folder}: something is there already; --resume goes on with it")
        config.out = str(folder)
        write_whole(folder / "config.json", json.dumps(asdict(config), indent=1))
    except OSError as error:
        raise ValueError(f"--out {folder}: cannot be written, {error}") from error
    return folder


def summarize(config, rows):
    """The line of summary.csv for a run's evaluated rows; `area` is the mean greedy accuracy over its steps."""
    steps, greedy = zip(*((row["step"], row["eval_greedy"]) for row in rows))
    area = sum((b - a) * (x + y) / 2 for a, b, x, y in zip(steps, steps[1:], greedy, greedy[1:])) / max(1, steps[-1])
    return {"selection": config.select[0], "seed": config.seed[0], "start": greedy[0], "best": max(greedy),
            "area": area, **{name[5:]: rows[-1][name] for name in columns(config)[-3:]}}


def compare(config):
    """Train every selection with every seed, of which each has one warm-up and one order of problems; print a table."""
    several, lines, curves = len(config.select) * len(config.seed) > 1, [], {name: [] for name in config.select}
    if several:
        prepare(config)             # files that do not fit end it here, where nothing has been written
        claim(config)
    for name, seed in [(name, seed) for name in config.select for seed in config.seed]:
        single = replace(config, select=(name,), seed=(seed,), out=f"{config.out}/{name}-{seed}") if several else config
        curves[name].append([row for row in train(single) if "eval_greedy" in row])
        lines.append(summarize(single, curves[name][-1]))
    write_table(Path(config.out) / "summary.csv", [*lines[0]], lines)
    say("\nheld-out problems " + "".join(f"{name[5:]:>17}" for name in columns(config)[-3:]))
    for label, name, when in (("before", config.select[0], 0), *((name, name, -1) for name in config.select)):
        cells = [[run[when][cell] for run in curves[name]] for cell in columns(config)[-3:]]  # before: one name will do
        say(f"{label:18}" + "".join(f"{mean(c):.3f}{f' +- {stdev(c):.3f}' if c[1:] else ''}".rjust(17) for c in cells))
    try:
        from assets.pictures import draw_run        # curves.png and tokens.html
        draw_run(Path(config.out))
    except ImportError:
        say("no pictures: assets/pictures.py is not here")


def parse(arguments):
    """The Config of a command line, or with --resume the saved one; ValueError, one line, for what cannot work."""
    def refuse(message):
        raise ValueError(message.removeprefix("argument "))
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)
    parser.error = refuse
    for f in fields(Config):
        how = {"action": "store_true"} if f.type is bool else {"nargs": "+" if f.type is tuple else None}
        parser.add_argument(f"--{f.name}", help=f.metadata["help"].replace("%", "%%"), **how)
    given = vars(parser.parse_args(arguments))
    if given.get("resume"):
        newest = max(Path("out").glob("*/config.json"), key=os.path.getmtime, default=Path("out/config.json"))
        path = Path(given["out"]) / "config.json" if "out" in given else newest
        try:
            saved = Config(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"--resume --out {path.parent}: no run can go on there: {error}") from error
        config = Config(**asdict(saved) | given | {"out": str(path.parent)})
        config.continues(asdict(saved))
        return config
    return Config(**given)


def main(arguments=None):
    """Run a command line; the exit code is 0, 1 if the run broke, 2 for bad input, 130 after Ctrl-C."""
    sys.stdout.reconfigure(errors="backslashreplace")           # a terminal that cannot show a character shows its code
    try:
        compare(config := parse(arguments))
    except KeyboardInterrupt as error:
        goes_on = f"; python train.py --resume --out {config.out} goes on" * os.path.exists(f"{config.out}/config.json")
        print(f"train.py: interrupted{error}{goes_on}", file=sys.stderr)
        return 130
    except (ValueError, OSError, FloatingPointError, ImportError, torch.OutOfMemoryError,
            torch._dynamo.exc.BackendCompilerFailed) as error:      # --compile without a C++ compiler: its text is long
        print("train.py:", " ".join(str(error).split("\n")[:2]).strip(), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How fast each part is, and against what: `python tests/bench.py` prints one table and, as its last line, JSON.

Everything runs on random weights, so nothing is downloaded; on two CPU cores it takes under three minutes.  Rates are
the best of a few interleaved tries, as other programs can only slow a try down.  With a GPU it adds bfloat16 and
--compile, of which the CPU, with a C++ compiler, shows the rollout.  An update's memory is measured in a process of its
own, `python tests/bench.py memory SELECT DTYPE`.
"""
import contextlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

import train
from gmts import parameter_grad_norms, select_tokens, token_scores
from model import SIZES, GPT, GPTConfig, byte_tokenizer
from rollout import Rollout, budgets, generate, micro_batches, sample
from verify import make_problems

DEVICE = train.ACCELERATOR
# The rollout that the peers were measured on: 4 prompts x 8 answers, up to 24 + 64 tokens.
PEERS = GPTConfig(hidden_size=128, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
                  vocab_size=64, embedding_rows=64, eos_token_ids=(1,))
# The widths and the vocabulary of SmolLM2-135M, which has 30 layers.
LARGE = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
             vocab_size=49152, embedding_rows=49152)
LAYERS = 6


def wait():
    """A GPU works on after the call returns; a clock has to wait for it."""
    if DEVICE != "cpu":
        torch.accelerator.synchronize()


def best(tries, *functions):
    """The shortest time in seconds of each function, their tries interleaved; one try before does not count."""
    seconds = [[] for _ in functions]
    for number in range(tries + 1):
        for function, taken in zip(functions, seconds):
            wait()
            start = time.perf_counter()
            function()
            wait()
            taken.append(time.perf_counter() - start)
    return [min(taken[1:]) for taken in seconds]


def matmul_rate(dtype=torch.float32):
    """FLOP/s of a large matrix product, which no program here can beat."""
    n = 8192 if DEVICE == "cuda" else 1536
    a = torch.randn(n, n, device=DEVICE, dtype=dtype)
    return 2 * n ** 3 / best(5, lambda: a @ a)[0]


def matrix_flops(config, positions, scored):
    """FLOP of the forward's matrix products, attention apart: `positions` in the blocks, `scored` at the vocabulary."""
    blocks = sum(p.numel() for p in GPT(config).blocks.parameters() if p.dim() == 2)
    return 2 * (blocks * positions + config.hidden_size * config.vocab_size * scored)


# ---- rollout

def ragged_prompts(count, longest, vocab_size):
    """Prompts of random ids whose lengths differ."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, vocab_size, (longest - 3 * (i % 4),), generator=generator).tolist() for i in range(count)]


@torch.inference_mode()
def uncached(model, prompts, group_size, new):
    """Generation as one would first write it: the whole text through the model for each token; the answers' lengths."""
    lengths = torch.tensor([len(p) for p in prompts], device=DEVICE).repeat_interleave(group_size)      # (B,)
    width, row = int(lengths.max()), torch.arange(len(lengths), device=DEVICE)
    tokens = torch.tensor([p + [0] * (width + new - len(p)) for p in prompts], device=DEVICE)           # (P, T)
    tokens = tokens.repeat_interleave(group_size, dim=0)                                                # (B, T)
    eos = torch.tensor(model.config.eos_token_ids, device=DEVICE)
    alive, count = torch.ones_like(row, dtype=torch.bool), torch.zeros_like(row)                        # (B,) each
    for step in range(new):
        hidden = model(tokens[:, :width + step])[row, lengths + step - 1]                               # (B, D)
        tokens[row, lengths + step] = ids = sample(model.logits(hidden))
        count += alive
        alive = alive & ~torch.isin(ids, eos)
        if not alive.any():
            break
    return count


def transformers_generate(model, prompts, group_size, new):
    """The same with Hugging Face transformers, from a folder that our model wrote: a function; None without it."""
    if not (find_spec("transformers") and find_spec("safetensors")):
        return None
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).to(DEVICE).eval()
    width, eos = max(map(len, prompts)), torch.tensor(model.config.eos_token_ids, device=DEVICE)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=DEVICE)                    # (P, width)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=DEVICE)        # (P, width)

    def run():
        with torch.inference_mode():
            out = theirs.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=0,
                                  num_return_sequences=group_size, eos_token_id=eos.tolist())[:, width:]
        ended = torch.isin(out, eos).int().cumsum(dim=1)                                                # (B, new)
        return (ended == 0).sum(dim=1) + (ended[:, -1] > 0)
    return run


def rates(tries, functions):
    """Tokens per second, EOS included and padding not, of functions that return the answers' lengths; best of tries."""
    rate = [0.0] * len(functions)
    for number in range(tries + 1):
        for i, function in enumerate(functions):
            wait()
            start = time.perf_counter()
            tokens = int(function().sum())
            if number:
                rate[i] = max(rate[i], tokens / (time.perf_counter() - start))
    return rate


def rollout_rates(model, prompts, group_size, new, tries, others=(), dtype=torch.float32):
    """Tokens per second: ours, then those of `others` (uncached, compiled, transformers); 0 for what is not here."""
    torch.manual_seed(0)
    config, texts = model.config, ragged_prompts(prompts, 24, model.config.vocab_size)
    compiles = DEVICE != "cpu" or any(map(shutil.which, ("g++", "clang++", "cl")))

    def ours(forward=None):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
            return generate(model, texts, group_size, new, config.eos_token_ids, forward=forward).answer_mask.sum(dim=1)
    compiled = torch.compile(model, dynamic=True)
    known = {"ours": ours, "uncached": lambda: uncached(model, texts, group_size, new),
             "compiled": compiles and (lambda: ours(compiled)),
             "transformers": "transformers" in others and transformers_generate(model, texts, group_size, new)}
    measured = [name for name in ("ours", *others) if known[name]]
    found = dict(zip(measured, rates(tries, [known[name] for name in measured])))
    return [found.get(name, 0.0) for name in ("ours", *others)]


# ---- update

def make_update(config, select, dead, prompts, group_size, new, **flags):
    """A function that runs train.update once, on a made-up batch in which `dead` of all groups have equal rewards."""
    torch.manual_seed(0)
    run = train.Run(train.Config(select=(select,), device=DEVICE, **flags), GPT(config).to(DEVICE), None, "")
    B, G, width = prompts * group_size, group_size, 24
    lengths = torch.randint(new // 4, new + 1, (B,))                                            # (B,)
    column = torch.arange(width + new)                                                          # (T,)
    mask = (column >= width) & (column < width + lengths[:, None])                              # (B, T)
    entropy = torch.rand(B, width + new) ** 4 * mask            # most tokens are nearly certain, as in real answers
    tokens = torch.randint(2, config.vocab_size, mask.shape)                                    # (B, T)
    A = torch.tensor([1.0, -1.0]).repeat(B // 2) * (torch.arange(B) // G >= dead * prompts)     # (B,)
    mask, tokens, entropy, A = (x.to(DEVICE) for x in (mask, tokens, entropy, A))
    logprobs = torch.zeros_like(entropy)
    batch = Rollout(tokens, torch.full_like(A, width).long(), mask, logprobs, entropy, entropy, A > 2)
    scores = token_scores(select, entropy, A[:, None] * mask)                                   # (B, T)
    kept = select_tokens(scores, mask, 1.0 if select == "all" else 0.2)                         # (B, T)
    for p in run.model.parameters():        # Adam's state is there before the update, as it is in all steps but one
        p.grad = torch.zeros_like(p)
    run.optimizer.step()
    run.optimizer.zero_grad()

    def step():
        train.update(run, batch, kept, A, logprobs)
    positions = sum(len(rows) * (T - 1) for rows, T in micro_batches(kept, budgets(run.model)[1]))
    step.model = run.model
    step.flops = 3 * matrix_flops(config, positions, int(kept.sum()))           # a backward takes twice a forward's
    return step


def memory():
    """The largest memory so far, in bytes."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():         # Linux: there ru_maxrss starts with what the parent process had
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def large(select, dead, prompts=4, group_size=4, **flags):
    """One update of a model of the shape of SmolLM2, LAYERS deep, as a function."""
    return make_update(GPTConfig(num_hidden_layers=LAYERS, **LARGE), select, dead, prompts, group_size, 96, **flags)


def print_memory(select, dtype):
    """The peak memory of an update in bytes, interpreter apart, and its part above weights, gradients and Adam's state:
    of the 16 x 8 answers of a default step held at once, as on a GPU; a CPU would take them in smaller parts."""
    interpreter = memory()
    step = large(select, 0, 16, 8, dtype=dtype)
    train.budgets = lambda model: (1, 10 ** 9, "")
    step()
    peak = memory() - interpreter
    print(json.dumps([peak, peak - 16 * sum(p.numel() for p in step.model.parameters())]))


def update_memory(dtype):
    """Ratios of total and own memory, 20% to all, and the four sizes in MiB; None if that fails (it takes 11 GB)."""
    sizes = []
    for select in ("gmts", "all"):
        command = [sys.executable, __file__, "memory", select, dtype]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if done.returncode:
            print("    no peak memory:", done.returncode, *done.stderr.decode().splitlines()[-1:])
            return None
        sizes.append([size / 2 ** 20 for size in json.loads(done.stdout.splitlines()[-1])])
    (some, own), (everything, own_of_all) = sizes
    return some / everything, own / own_of_all, some, everything, own, own_of_all


# ---- selection, a whole step

def selection_seconds(n):
    """Scoring and selecting n sampled tokens, in answers of 100."""
    entropy, A = torch.rand(n // 100, 100, device=DEVICE), torch.randn(n // 100, 1, device=DEVICE)
    mask = torch.ones_like(entropy, dtype=torch.bool)
    return best(5, lambda: select_tokens(token_scores("gmts", entropy, A * mask), mask))[0]


def steps(config, count, **flags):
    """Seconds of rollout, scoring with selection, and update in each of `count` steps; the reward is a coin."""
    train.reward, train.watch = lambda text, gold: float(len(text) % 2), lambda run, row: None
    run = train.Run(train.Config(device=DEVICE, **flags), GPT(config).to(DEVICE), byte_tokenizer(),
                    train.TEMPLATES["bytes"])
    run.problems = make_problems("math", 3, 500, 0)
    rows = [train.reinforce(run) for _ in range(count + 1)][1:]
    return [[row[f"{phase}_s"] for phase in ("rollout", "score", "update")] for row in rows]


def trl_step(config, prompts, group_size, new, count):
    """Median seconds of a step of TRL's GRPOTrainer with its own entropy mask, from a folder that our model wrote and
    with a coin for a reward; 0 without TRL."""
    if not all(map(find_spec, ("trl", "datasets", "transformers", "safetensors"))):
        return 0.0
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import transformers
    import trl
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):    # it prints its metrics
        GPT(config).save_pretrained(folder)
        arguments = trl.GRPOConfig(
            folder, max_steps=count, per_device_train_batch_size=prompts * group_size, num_generations=group_size,
            max_completion_length=new, top_entropy_quantile=0.2, epsilon_high=0.28, beta=0.0, learning_rate=3e-4,
            bf16=False, gradient_checkpointing=False, use_cpu=DEVICE == "cpu", report_to="none", save_strategy="no",
            logging_steps=1, disable_tqdm=True)
        trainer = trl.GRPOTrainer(
            transformers.AutoModelForCausalLM.from_pretrained(folder), args=arguments,
            reward_funcs=lambda completions, **columns: [float(len(text) % 2) for text in completions],
            train_dataset=datasets.Dataset.from_list([{"prompt": p.question} for p in make_problems("math", 3, 99, 0)]),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder))
        trainer.train()
    return median(log["step_time"] for log in trainer.state.log_history if "step_time" in log)


def norm_seconds():
    """Exact gradient norms of 16 answers of the tiny model: ours, and one backward pass per position, prompt too.

    The second way is timed on every seventh position of one answer and scaled to all 16 x 120.
    """
    model, tokens = GPT(SIZES["tiny"]).to(DEVICE), torch.randint(256, (16, 120), device=DEVICE)
    place, start = torch.arange(120, device=DEVICE), torch.randint(50, 70, (16, 1), device=DEVICE)
    chosen = (place >= start) & (place < start + torch.randint(35, 51, (16, 1), device=DEVICE))

    def loop():
        logprobs = model.logits(model(tokens[:1])[0, :-1]).log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        for t in range(0, 119, 7):
            gradients = torch.autograd.grad(logprobs[t], list(model.parameters()), retain_graph=True)
            torch.cat([g.flatten() for g in gradients]).norm()

    ours, some = best(2, lambda: parameter_grad_norms(model, tokens, chosen), loop)
    return ours, some * 16 * 120 / 17


def main():
    torch.manual_seed(0)
    peak, gpu = matmul_rate(), DEVICE == "cuda"
    name = torch.cuda.get_device_name() if gpu else f"{torch.get_num_threads()} CPU threads"
    print(f"torch {torch.__version__}, {name}; a large matrix product: {peak / 1e9:,.0f} GFLOP/s\n")
    print(f"{'':58}{'ours':>12}{'other':>12}  {'ratio':>7}")

    def line(what, ours, other=None, unit="", digits=0, ratio=None):
        cells = [f"{x:,.{digits}f}" if x else "" for x in (ours, other)]
        ratio = f"{ratio:.2f}" if ratio else ""
        print(f"{what:58}{cells[0]:>12}{cells[1]:>12}  {ratio:>7}  {unit}", flush=True)

    peers, tiny_model = GPT(PEERS).to(DEVICE), GPT(SIZES["tiny"]).to(DEVICE)
    ours, naive, compiled, theirs = rollout_rates(peers, 4, 8, 64, 3, ("uncached", "compiled", "transformers"))
    line("rollout, 4 x 8 answers, up to 64 tokens: uncached", ours, naive, "tok/s", ratio=ours / naive)
    line("    transformers' generate", ours, theirs, "tok/s", ratio=theirs and ours / theirs)
    line("    with --compile: transformers' generate", compiled, theirs, "tok/s", ratio=theirs and compiled / theirs)
    many, many_compiled, their_many = rollout_rates(peers, 16, 8, 200, 2, ("compiled", "transformers"))
    line("rollout, 16 x 8 answers, up to 200 tokens: transformers", many, their_many, "tok/s",
         ratio=their_many and many / their_many)
    line("    with --compile", many_compiled, their_many, "tok/s", ratio=their_many and many_compiled / their_many)
    tiny, = rollout_rates(tiny_model, 16, 8, 96, 3)
    flops = matrix_flops(SIZES["tiny"], 1, 1)
    line("rollout, tiny, 16 x 8 answers, up to 96 tokens", tiny, unit="tok/s")
    line("    its matrix products, of the large one's FLOP/s", tiny * flops / 1e9, peak / 1e9, "GFLOP/s",
         ratio=tiny * flops / peak)
    if gpu:
        low = rollout_rates(tiny_model, 16, 8, 96, 3, ("compiled",), torch.bfloat16)
        line("rollout, the same in bfloat16, and with --compile", *low, "tok/s")

    ratios, memories = {}, None
    for dtype, compile in [("float32", False)] + [("bfloat16", False), ("bfloat16", True)] * gpu:
        for dead in (0, 0.5):
            what = f"vocabulary 49,152, {dtype}{', --compile' * compile}, {dead:.0%} dead groups"
            both = [large(select, dead, dtype=dtype, compile=compile) for select in ("gmts", "all")]
            seconds = best(2, *both)
            line(f"update, {what}", *seconds, "s, 20% and all", 2, seconds[0] / seconds[1])
            line("    its matrix products", *(step.flops / s / 1e9 for step, s in zip(both, seconds)), "GFLOP/s")
            if dtype == "float32":
                ratios[dead] = seconds[0] / seconds[1]
        if not compile and (found := update_memory(dtype)):
            memories = memories or found
            line("    peak memory, 16 x 8 answers at once, none dead", *found[2:4], "MiB", 0, found[0])
            line("    of it activations, logits and their gradients", *found[4:], "MiB", 0, found[1])
    byte = best(4, *(make_update(SIZES["tiny"], s, 0, 16, 8, 96) for s in ("gmts", "all")))
    line("update, byte vocabulary, tiny, no dead group: time", *byte, "s, 20% and all", 3, byte[0] / byte[1])

    selection = {n: selection_seconds(n) for n in (10 ** 4, 10 ** 5, 10 ** 6)}
    for n, seconds in selection.items():
        line(f"score and select, {n:,} tokens", seconds * 1e3, unit="ms", digits=2)
    norms = norm_seconds()
    line("exact gradient norms, tiny, 16 answers: a loop over positions", *norms, "s", 2, norms[1] / norms[0])
    config = replace(PEERS, vocab_size=259, embedding_rows=264, eos_token_ids=(256,))
    flags = dict(prompts=4, group_size=8, max_new_tokens=64, dtype="float32")
    whole = median(map(sum, steps(config, 20, **flags)))
    trl_whole = trl_step(config, 4, 8, 64, 10)
    line("a whole step, 4 x 8 answers, up to 64 tokens: TRL's", whole, trl_whole, "s", 2, trl_whole / whole)
    phases = min(steps(SIZES["tiny"], 4), key=sum)
    for what, seconds in zip(("sample and verify", "score and select", "update"), phases):
        line(f"a default step, tiny, 16 x 8 answers: {what}", seconds * 1e3, unit="ms", digits=1)

    print("\n" + json.dumps({
        "device": DEVICE, "threads": torch.get_num_threads(), "matmul_gflops": round(peak / 1e9),
        "rollout_tok_s": round(ours), "rollout_vs_uncached": round(ours / naive, 2),
        "rollout_vs_transformers": round(ours / theirs, 2) if theirs else None,
        "rollout_compiled_vs_transformers": round(compiled / theirs, 2) if compiled and theirs else None,
        "rollout_large_vs_transformers": round(many / their_many, 2) if their_many else None,
        "rollout_tiny_tok_s": round(tiny), "update_time_ratio": round(ratios[0], 3),
        "update_time_ratio_half_dead": round(ratios[0.5], 3),
        "update_memory_ratio": memories and round(memories[0], 3),
        "update_own_memory_ratio": memories and round(memories[1], 3),
        "update_byte_time_ratio": round(byte[0] / byte[1], 3),
        "step_vs_trl": round(trl_whole / whole, 2) or None, "norms_vs_loop": round(norms[1] / norms[0], 2),
        "select_1m_s": round(selection[10 ** 6], 4),
        "score_select_share": round(phases[1] / sum(phases), 4)}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        print_memory(*sys.argv[2:])
    else:
        main()

"""Groups of sampled answers: one prefill per prompt, cached decoding, what the policy thought of each sampled token.

`python rollout.py RUN` answers questions that you type, with a trained run's model.

Shapes: P prompts, G answers per prompt, B = P * G answers, R rows still being written, T padded length, D hidden size,
V vocabulary, N tokens.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gmts import learning_coefficient, select_tokens, token_stats
from model import KVCache

MAX_ROWS = 512        # answers that are decoded at once
STEPS_PER_CHECK = 8   # how often the host asks the device who has finished; each question waits for the device


@dataclass
class Rollout:
    """A batch of sampled answers, right-padded.  Entry t of a (B, T) field is of tokens[:, t], given those before."""
    tokens: torch.Tensor           # (B, T) prompt, answer, then padding in no mask (its id, 0, is an ordinary token)
    prompt_lengths: torch.Tensor   # (B,)
    answer_mask: torch.Tensor      # (B, T) bool: the sampled tokens, first EOS included, nothing after it
    logprobs: torch.Tensor         # (B, T) nats, at the sampling temperature, before top-p; 0 outside answer_mask
    entropy: torch.Tensor          # (B, T) nats, likewise
    logit_grad_norm: torch.Tensor  # (B, T) likewise
    finished: torch.Tensor         # (B,) bool: ended by an EOS and not by the length limit

    def take_rows(self, rows):
        """The rollout of the given rows only."""
        return Rollout(**{name: value[rows] for name, value in vars(self).items()})

    @staticmethod
    def join(rollouts):
        """One rollout with the rows of several, padded to the widest."""
        T = max(r.tokens.shape[1] for r in rollouts)
        pad = lambda value: F.pad(value, (0, T - value.shape[1])) if value.dim() == 2 else value
        return Rollout(**{name: torch.cat([pad(vars(r)[name]) for r in rollouts]) for name in vars(rollouts[0])})

    def answers(self):
        """The sampled ids of each row, a closing EOS left out: list of B lists, ready to be decoded."""
        ends = self.prompt_lengths + self.answer_mask.sum(dim=1) - self.finished.long()             # (B,)
        return [row[s:e] for row, s, e in zip(self.tokens.tolist(), self.prompt_lengths.tolist(), ends.tolist())]

    def describe(self, rewards):
        """Metrics of all answers, given their rewards (P, G); `commonest` is the share of the commonest token."""
        right, lengths, ids = rewards.flatten() > 0, self.answer_mask.sum(dim=1).float(), self.tokens[self.answer_mask]
        return {name: float(value) for name, value in {
            "reward": rewards.mean(), "pass_rate": (rewards > 0).any(dim=1).float().mean(),
            "dead_groups": (rewards == rewards[:, :1]).all(dim=1).float().mean(),
            "truncated": 1 - self.finished.float().mean(), "length": lengths.mean(),
            "length_right": lengths[right].mean(), "length_wrong": lengths[~right].mean(),
            "entropy": self.entropy[self.answer_mask].mean(), "commonest": ids.bincount().max() / len(ids)}.items()}

    def describe_kept(self, kept, right, logprobs, entropy, advantages, ref_logprobs, c):
        """Metrics of the selection kept (B, T) under a configuration; `largest` is one answer's share of the kept."""
        live, n, total = self.answer_mask, max(1, int(kept.sum())), max(1, int(self.answer_mask.sum()))
        by_entropy = select_tokens(entropy, live, c.keep, c.scope, c.group_size)            # (B, T)
        clipped = learning_coefficient(logprobs, self.logprobs, advantages, c.clip_low, c.clip_high) == 0   # (B, T)
        log_ref = (ref_logprobs - logprobs)[live]                                           # (N,)
        return {"entropy_kept": entropy[kept].sum().item() / n, "kept_share": n / total if kept.any() else 0.0,
                "overlap_entropy": int((kept & by_entropy).sum()) / n, "kept_right": int(kept[right].sum()) / n,
                "clip_share": int((clipped & live & (advantages != 0)[:, None]).sum()) / total,
                "largest": max(kept.sum(dim=1).tolist(), default=0) / n,
                "kl": (torch.expm1(log_ref) - log_ref).mean().item() if c.beta else math.nan}


def sample(logits, temperature=1.0, top_p=1.0, generator=None):
    """One token id per row of logits (R, V).  temperature 0 is argmax; top_p keeps the smallest set that holds it."""
    if temperature == 0:
        return logits.argmax(dim=-1)                                                # (R,)
    p = torch.softmax(logits.float() / temperature, dim=-1)                         # (R, V)
    if top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True)                            # (R, V)
        ordered[ordered.cumsum(dim=-1) - ordered >= top_p] = 0                      # what precedes already suffices
        p = torch.zeros_like(p).scatter(-1, index, ordered)
    # Inverse CDF: one random number per row, not one per token.  The target is in (0, total], and the first entry that
    # reaches it is larger than the entry before it, so a token of probability 0 can never be drawn.
    cdf = p.cumsum(dim=-1)                                                          # (R, V)
    target = cdf[:, -1:] * (1 - torch.rand(len(p), 1, generator=generator, device=p.device))   # (R, 1)
    return torch.searchsorted(cdf, target)[:, 0].clamp(max=p.shape[1] - 1)          # (R,) beyond it where p is NaN


def generate(model, prompts, group_size, max_new_tokens, eos_ids, temperature=1.0, top_p=1.0, generator=None,
             forward=None):
    """Sample `group_size` answers to each prompt (a list of token ids); rows in prompt order, G neighbours a prompt.

    Answers end with one of `eos_ids` (kept) or after `max_new_tokens`.  `forward` stands in for the model once the
    prompts are read, such as a compiled one.  ValueError when prompt and answer do not fit the context or a prompt is
    empty; FloatingPointError, naming the step, when the logits are not numbers.
    """
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token")
    device, width = model.embed.weight.device, max(map(len, prompts))
    if width + max_new_tokens > (context := model.config.max_position_embeddings):
        raise ValueError(f"a prompt of {width} and {max_new_tokens} new tokens do not fit the context of {context}")
    with torch.inference_mode():
        how = eos_ids, temperature, top_p, generator, forward
        sampled, stats = _decode(model, prompts, group_size, max_new_tokens, *how)
    # Outside inference mode, so that the results may enter a graph.
    is_eos = torch.isin(sampled, torch.tensor(eos_ids, device=device))              # (B, new)
    live = is_eos.cumsum(dim=1) - is_eos.long() == 0                                # (B, new) up to the first EOS
    lengths = torch.tensor([len(p) for p in prompts], device=device).repeat_interleave(group_size)   # (B,)
    T = int((lengths + live.sum(dim=1)).max())
    tokens = torch.zeros(len(lengths), T, dtype=torch.long, device=device)          # (B, T)
    tokens[:, :width] = torch.tensor([p + [0] * (width - len(p)) for p in prompts for _ in range(group_size)])
    row, step = live.nonzero(as_tuple=True)                                         # (N,) each
    column = lengths[row] + step                                                    # (N,)
    tokens[row, column] = sampled[row, step]
    fields = torch.zeros(3, *tokens.shape, device=device)                           # (3, B, T)
    fields[:, row, column] = stats[:, row, step]
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[row, column] = True
    return Rollout(tokens, lengths, mask, *fields, finished=(is_eos & live).any(dim=1))


def _decode(model, prompts, group_size, max_new_tokens, eos_ids, temperature, top_p, generator, forward):
    """The loop: sampled ids (B, new) and their logprob, entropy, logit_grad_norm (3, B, new); rubbish after an EOS."""
    device, width = model.embed.weight.device, max(map(len, prompts))
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else model.embed.weight.dtype
    padding = torch.tensor([width - len(p) for p in prompts], device=device)        # (P,)
    cache = KVCache(model.config, padding, width, dtype)
    left_padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)   # (P, width)
    hidden = model(left_padded, cache)[:, -1]                                       # (P, D)
    repeat = torch.arange(len(prompts), device=device).repeat_interleave(group_size)           # (B,)
    cache, hidden = cache.take_rows(repeat, width + max_new_tokens), hidden[repeat]
    eos = torch.tensor(eos_ids, device=device)
    rows = torch.arange(len(repeat), device=device)                                 # (R,) answers still being written
    sampled = torch.zeros(len(rows), max_new_tokens, dtype=torch.long, device=device)          # (B, new)
    stats = torch.zeros(3, *sampled.shape, device=device)                           # (3, B, new)
    first, ids, values = 0, [], []                                                  # sampled since the last check
    for step in range(max_new_tokens):
        logits = model.logits(hidden).float()                                       # (R, V)
        ids.append(sample(logits, temperature, top_p, generator))                   # (R,)
        values.append(torch.stack(token_stats(logits / (temperature or 1.0), ids[-1])))        # (3, R)
        next_ids, last = ids[-1], step == max_new_tokens - 1
        if last or len(ids) == STEPS_PER_CHECK:
            chunk = torch.stack(ids, dim=1)                                         # (R, chunk)
            sampled[rows, first:step + 1] = chunk
            stats[:, rows, first:step + 1] = torch.stack(values, dim=2)             # (3, R, chunk)
            wrong = stats[1, :, first:step + 1].isnan().any(dim=0)
            if wrong.any():
                bad = first + int(wrong.nonzero()[0])
                raise FloatingPointError(f"the logits of decoding step {bad} are not numbers (NaN or inf)")
            alive = (~torch.isin(chunk, eos).any(dim=1)).nonzero()[:, 0]            # (R',)
            first, ids, values = step + 1, [], []
            if last or not len(alive):
                break
            if (n := len(alive)) < len(rows):       # finished rows leave; the last rows still alive fill their places
                order = torch.arange(n, device=device)                              # (R',)
                order[~torch.isin(order, alive)] = alive[alive >= n]
                rows, next_ids = rows[order], next_ids[order]
                cache.keep_rows(order)
        hidden = (model if forward is None else forward)(next_ids[:, None], cache)[:, 0]        # (R, D)
    return sampled, stats


def token_logits(model, tokens, row, column, forward=None):
    """Logits (N, V), fp32, of the tokens at (row, column) (N,) of tokens (B, T); only these meet the vocabulary."""
    hidden = (model if forward is None else forward)(tokens[:, :-1])                # (B, T - 1, D)
    return model.logits(hidden[row, column - 1]).float()                            # (N, V)


def score(model, rollout, temperature=1.0):
    """logprobs, entropy, logit_grad_norm (3, B, T) of the sampled tokens under `model`; no gradient."""
    scores = torch.zeros(3, *rollout.tokens.shape, device=rollout.tokens.device)    # (3, B, T)
    with torch.no_grad():
        for rows, T in micro_batches(rollout.answer_mask, budgets(model)[1]):
            r, t = rollout.answer_mask[rows, :T].nonzero(as_tuple=True)             # (N,) each
            logits = token_logits(model, rollout.tokens[rows, :T], r, t) / temperature                  # (N, V)
            scores[:, rows[r], t] = torch.stack(token_stats(logits, rollout.tokens[rows[r], t]))
    return scores


def micro_batches(mask, budget):
    """Split the rows of mask (B, T) to compute at most `budget` positions at once: yields rows (R,) and their width.

    A row needs the positions up to its last marked token; one without a marked token is left out, and rows of like
    widths go together, so that little is computed for padding.  No result may depend on this split.
    """
    column = torch.arange(1, mask.shape[1] + 1, device=mask.device)                 # (T,)
    widths, order = (mask * column).amax(dim=1).sort(descending=True, stable=True)  # (B,) each
    order, widths = order[widths > 0], widths[widths > 0].tolist()
    while widths:
        n = max(1, budget // widths[0])
        yield order[:n], widths[0]
        order, widths = order[n:], widths[n:]


def budgets(model, width=1):
    """(rows of `width` tokens to decode at once, positions to hold at once until a backward pass, a line that says so).
    Estimates from above: each gets half of what weights, gradients, AdamW and a reference leave of a GPU, or 4 GB; a
    position takes 12 D + 6 F floats a layer and 3 V for its logits; a row in decoding keys, values and 8 V."""
    c, n, gpu = model.config, 4e-9 * sum(p.numel() for p in model.parameters()), model.embed.weight.is_cuda     # n: GB
    layer = 12 * max(c.hidden_size, c.num_attention_heads * c.head_dim) + 6 * c.intermediate_size
    row = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * width + 8 * c.vocab_size
    row, position = 4e-9 * row, 4e-9 * (c.num_hidden_layers * layer + 3 * c.vocab_size)             # GB
    free = (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()) / 1e9 - 5 * n if gpu else 8.0
    rows, positions = (max(1, int(min(free / 2 / size, most))) for size, most in (
        (row, MAX_ROWS), (position, math.inf if gpu else 2048)))                    # more would leave a CPU's cache
    return rows, positions, (f"GB at most: weights {n:.2f} (--beta: twice), gradients {n:.2f}, AdamW {2 * n:.2f}, "
                             f"{rows} cached rows {rows * row:.2f} or {positions} positions {positions * position:.2f}")


def pass_at_k(n, right, k):
    """The chance that one of k answers is right, unbiased from n (arXiv 2107.03374, eq. 1).  ValueError if k > n."""
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {n}")
    return 1 - math.comb(n - right, k) / math.comb(n, k)


if __name__ == "__main__":
    import sys
    import train
    try:
        run = train.load_run(sys.argv[1])
    except (IndexError, ImportError, ValueError, OSError) as error:
        sys.exit(f"usage: python rollout.py RUN, a folder that train.py wrote ({error})")
    print(f"Ask, a question a line (\\n stands for a line break), such as: {run.eval_problems[0].question!r}")
    for line in sys.stdin:
        try:
            ids = generate(run.model, [run.encode(line.strip().replace("\\n", "\n"))], 1, run.config.max_new_tokens,
                           run.model.config.eos_token_ids, run.config.temperature, run.config.top_p).answers()[0]
            print(run.tokenizer.decode(ids), flush=True)
        except ValueError as error:
            print(f"({error})")

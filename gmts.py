"""GMTS: gradient-magnitude-based token selection, and the GRPO/DAPO objective that it selects for.

The gradient of one sampled token's objective is  omega * grad log pi  (`learning_coefficient`), and the entropy E of
the policy at that token stands in for the size of grad log pi.  So |E * omega| estimates how much a token would move
the weights; GMTS trains on the top 20% of the batch by that score (Lv, Zhang, Zhang 2026, arXiv 2608.30632).  Entropy
alone (arXiv 2506.01939) ranks tokens well inside one answer, but knows nothing of the advantage that ranks answers.

Pure functions of plain tensors, torch only: this one file drops into another trainer.

Shapes: B answers, P prompts, G answers per prompt, T padded length, N tokens, V vocabulary.  Logarithms are natural.
"""
import torch
from torch import nn

MAX_LOG_RATIO = 20.0   # exp(20) = 5e8: beyond it a ratio says only "far away", and exp would overflow


def group_advantages(rewards, scale=True):
    """Advantages (P, G) of rewards (P, G): (R - mean) / std over the group, population std (GRPO, arXiv 2402.03300).

    A dead group, all of whose rewards are equal, gets exactly 0.  scale=False leaves out the std (Dr. GRPO, arXiv
    2503.20783).  ValueError if G < 2: a group of one has nothing to compare with.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be (P, G) with at least 2 answers per prompt, not {tuple(rewards.shape)}")
    rewards = rewards.float()
    dead = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)                     # (P, 1)
    centred = rewards - rewards.mean(dim=1, keepdim=True)                           # (P, G)
    if scale:
        centred = centred / rewards.std(dim=1, correction=0, keepdim=True)          # (P, G)
    # Compared, not subtracted: the mean of eight times 0.1 is not 0.1 in fp32; the tiny rest over a tiny std is noise.
    return torch.where(dead, 0.0, centred)


def token_stats(logits, targets):
    """What one softmax tells about each sampled token: logprob, entropy and logit_grad_norm, each (N,) in fp32.

    logits (N, V), already divided by the sampling temperature; targets (N,) the sampled ids.  logit_grad_norm is
    || d log p_y / dz || = || onehot(y) - p ||, the exact norm of the gradient over the logits (arXiv 2506.12912).
    """
    z = logits.float()
    top, where_top = z.max(dim=-1, keepdim=True)                                    # (N, 1) each
    z = z - top                                                                     # (N, V)
    # log1p of the rest, not logsumexp of all: all entropy of a nearly certain policy is in a tail that 1 + tail drops.
    log_total = z.exp().scatter(-1, where_top, 0.0).sum(dim=-1, keepdim=True).log1p()   # (N, 1)
    y = targets[:, None]                                                            # (N, 1)
    logprob = z.gather(-1, y) - log_total                                           # (N, 1)
    p = (z - log_total).exp()                                                       # (N, V)
    # A masked logit is -inf with p = 0; clamped, 0 * z is 0 and so is its gradient, where 0 * -inf would be NaN.
    expected_z = (p * z.clamp(min=torch.finfo(z.dtype).min)).sum(dim=-1, keepdim=True)   # (N, 1) never above 0
    # p_y - 1 as expm1 of the log-prob: near p_y = 1 the textbook form 1 - 2 p_y + sum p^2 cancels to noise.
    residual = p.scatter(-1, y, torch.expm1(logprob))                               # (N, V)
    return logprob[:, 0], (log_total - expected_z)[:, 0], residual.norm(dim=-1)


def learning_coefficient(logprobs, old_logprobs, advantages, clip_low, clip_high, ref_logprobs=None, beta=0.0):
    """omega (B, T), the scalar that multiplies grad log pi of each token in the gradient of `policy_objective` (GMTS).

        omega = r A I(r, A) + beta (pi_ref / pi - 1),   r = pi / pi_old,
        I = 0 if (A > 0 and r > 1 + clip_high) or (A < 0 and r < 1 - clip_low), else 1

    logprobs, old_logprobs, ref_logprobs (B, T); advantages (B,).
    """
    log_ratio, A = logprobs - old_logprobs, advantages[:, None]                     # (B, T), (B, 1)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()                    # (B, T)
    clipped = ((A > 0) & (ratio > 1 + clip_high)) | ((A < 0) & (ratio < 1 - clip_low))   # (B, T)
    omega = torch.where(clipped | (log_ratio.abs() > MAX_LOG_RATIO), 0.0, ratio * A)     # (B, T)
    if beta:
        log_ref = ref_logprobs - logprobs                                           # (B, T)
        omega = omega + torch.where(log_ref.abs() > MAX_LOG_RATIO, 0.0, beta * torch.expm1(log_ref))
    return omega.detach()


SELECTIONS = {  # name -> score from entropy, omega and logit_grad_norm; a further selection is one more line here
    "all": lambda entropy, omega, norm: torch.ones_like(entropy),
    "entropy": lambda entropy, omega, norm: entropy,
    "gmts": lambda entropy, omega, norm: (entropy * omega).abs(),
    "exact": lambda entropy, omega, norm: (omega * norm).abs(),
}


def token_scores(selection, entropy, omega, logit_grad_norm=None, generator=None):
    """How much each token deserves to be trained on: scores (B, T), constants for autograd.

    "entropy" is the 80/20 rule's E, "gmts" |E * omega|, "exact" |omega| * logit_grad_norm, "all" 1, and "random" a
    uniform draw from `generator`, the control that says what the choice itself is worth.  ValueError for another name.
    """
    if selection == "random":
        # In (0, 1], not [0, 1): a score of 0 is never kept.
        return 1 - torch.rand(entropy.shape, generator=generator, device=entropy.device)   # (B, T)
    if selection not in SELECTIONS:
        raise ValueError(f"selection must be one of random, {', '.join(SELECTIONS)}, not {selection!r}")
    return SELECTIONS[selection](entropy, omega, logit_grad_norm).detach()


def select_tokens(scores, answer_mask, keep=0.2, scope="batch", group_size=None, bottom=False):
    """kept (B, T) bool: the share `keep` of the live tokens with the highest scores, counted within each scope.

    scores (B, T), answer_mask (B, T) bool.  Of the n live tokens of a scope ("batch", "group" of `group_size`
    neighbouring rows, or "answer") exactly floor(keep * n + 1e-9), at least 1, are kept; fewer only where fewer score
    above 0.  Ties go to the lowest index and NaN is never kept.  bottom=True keeps as many of the LOWEST scores
    instead, zeros included (the paper's control).  ValueError for a wrong keep or scope.
    """
    rows = {"batch": scores.shape[0], "group": group_size, "answer": 1}.get(scope)
    if not 0 < keep <= 1:
        raise ValueError(f"keep must be above 0 and at most 1, not {keep}")
    if scores.numel() == 0:
        return torch.zeros_like(answer_mask)
    if not rows or scores.shape[0] % rows:
        raise ValueError(f"scope {scope!r} with group_size {group_size} does not divide {scores.shape[0]} answers")
    x = scores.float().reshape(scores.shape[0] // rows, -1)                         # (scopes, rows * T)
    live = answer_mask.reshape(x.shape)                                             # (scopes, rows * T)
    eligible = live & ~x.isnan() if bottom else live & (x > 0)                      # NaN > 0 is false
    x = torch.where(eligible, -x if bottom else x, float("-inf"))                   # (scopes, rows * T)
    k = [max(int(keep * n + 1e-9), 1) for n in live.sum(dim=1).tolist()]            # 1e-9: 0.29 * 100 is 28.99999...
    # The k-th largest value decides, found in linear time; what equals it is kept from the left until k is reached.
    threshold = torch.stack([row.kthvalue(len(row) - k_row + 1).values for row, k_row in zip(x, k)])[:, None]
    above, tied = x > threshold, eligible & (x == threshold)                        # (scopes, rows * T)
    tied &= tied.cumsum(dim=1) <= torch.tensor(k, device=x.device)[:, None] - above.sum(dim=1, keepdim=True)
    return (above | tied).reshape(answer_mask.shape)


def policy_objective(logprobs, old_logprobs, advantages, clip_low, clip_high, ref_logprobs=None, beta=0.0):
    """The objective l (B, T) of each token, to be maximised (PPO-clip with two bounds: DAPO, arXiv 2503.14476, eq. 8).

        l = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - beta (pi_ref / pi - log(pi_ref / pi) - 1)

    The KL term is part of l, so it acts on kept tokens only, as in the paper's text; the reference gets no gradient.
    """
    def clamp(x, low, high):        # torch's own has gradient 1 at the very bounds, but from 2.14 on 0
        return torch.where((x < low) | (x > high), x.detach().clamp(low, high), x)

    A = advantages[:, None]                                                         # (B, 1)
    ratio = clamp(logprobs - old_logprobs.detach(), -MAX_LOG_RATIO, MAX_LOG_RATIO).exp()    # (B, T)
    objective = torch.minimum(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A)     # (B, T)
    if beta:
        log_ref = clamp(ref_logprobs.detach() - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)    # (B, T)
        objective = objective - beta * (torch.expm1(log_ref) - log_ref)
    return objective


def loss_weights(kept, answer_mask, divisor="kept", max_new_tokens=None):
    """The weight (B, T) of each token's objective in the loss, 0 where not kept; fixed BEFORE any split into rows.

    "kept": 1 / kept tokens (GMTS, DAPO); "live": 1 / sampled tokens; "answer": 1 / (B |o_i|) with |o_i| the tokens of
    the answer (GRPO); "constant": 1 / (B max_new_tokens) (Dr. GRPO, which has no length in the divisor).
    """
    B = kept.shape[0]
    total = {"kept": lambda: kept.sum(), "live": lambda: answer_mask.sum(),
             "answer": lambda: B * answer_mask.sum(dim=1, keepdim=True),            # (B, 1)
             "constant": lambda: torch.tensor(B * max_new_tokens)}[divisor]()
    return kept / total.clamp(min=1)


def policy_loss(objective, kept, answer_mask, divisor="kept", max_new_tokens=None):
    """The scalar to minimise: minus the weighted sum of the kept tokens' objective (B, T), see `loss_weights`."""
    weights = loss_weights(kept, answer_mask, divisor, max_new_tokens)              # (B, T)
    return -(weights * torch.where(kept, objective, 0.0)).sum()                     # where: NaN * 0 would be NaN


def parameter_grad_norms(model, tokens, chosen, omega=None, temperature=1.0, copies=32):
    """|| grad_theta log pi || over ALL parameters for each chosen token, times |omega| if omega is given: (B, T).

    tokens, chosen (bool), omega (B, T); 0 where not chosen.  Exact: the yardstick for every cheap score.  `model` is
    our GPT.  Each chosen token gets a copy of the text before it, so ONE backward pass, down to the outputs of the
    modules, serves `copies` tokens; the gradient of a weight is then, copy by copy, the product of what came in and
    what came back.  ValueError when a chosen token has nothing before it.
    """
    if chosen[:, :1].any():
        raise ValueError("the first token of a row has no log-prob: nothing stands before it")
    row, column = chosen.nonzero(as_tuple=True)                                     # (N,) each
    norms, calls = torch.zeros(tokens.shape, device=tokens.device), []              # (B, T)
    # The last feed-forward matters at one position only (`end`, in the loop); what it adds elsewhere, nobody reads.
    hooks = [model.blocks[-1].mlp_norm.register_forward_pre_hook(lambda module, inputs: inputs[0][end][:, None])]
    hooks += [module.register_forward_hook(lambda *call: calls.append(call))        # a call: (module, inputs, output)
              for module in model.modules() if isinstance(module, (nn.Linear, nn.RMSNorm, nn.Embedding))]
    try:
        for part in column.argsort().split(copies) if len(column) else ():          # (n,) tokens of like position
            calls.clear()
            b, t = row[part], column[part]                                          # (n,) each
            end = torch.arange(len(t), device=t.device), t - 1                      # the places that predict the tokens
            with torch.enable_grad():
                hidden = model(tokens[b, :int(t.max())])[end]                       # (n, D)
                logits = model.logits(hidden)                                       # (n, V)
                total = token_stats(logits / temperature, tokens[b, t])[0].sum()    # the copies do not touch each other
            grads = torch.autograd.grad(total, [logits] + [output for _, _, output in calls])
            with torch.no_grad():
                norms[b, t] = _squared_norms(model, calls, hidden, *grads).sqrt()
    finally:
        for hook in hooks:
            hook.remove()
    return norms if omega is None else norms * omega.abs()


def _squared_norms(model, calls, hidden, d_logits, *d_outputs):
    """Squared gradient norm (n,) of each copy, from the calls of the modules and the gradients of their outputs."""
    total = d_logits.square().sum(dim=1) * hidden.square().sum(dim=1)               # (n,) output matrix: outer product
    for (module, (x, *_), _), g in zip(calls, d_outputs):
        if isinstance(module, nn.Linear):
            total += (g.mT @ x).flatten(1).norm(dim=1).square()                     # (n, out, in) -> (n,)
            if module.bias is not None:
                total += g.sum(dim=1).square().sum(dim=1)                           # (n,)
        elif isinstance(module, nn.RMSNorm):
            normed = nn.functional.rms_norm(x, x.shape[-1:], None, module.eps)      # (n, ..., D)
            total += (g * normed).flatten(1, -2).sum(dim=1).square().sum(dim=1)     # (n,)
        else:  # Embedding: places with the same token write to the same row, so their gradients add before they square.
            same = x[:, :, None] == x[:, None, :]                                   # (n, S, S)
            total += ((g @ g.mT) * same).sum(dim=(1, 2))                            # (n,)
            if model.lm_head is None:                                               # tied: both ends write to it
                total += 2 * (d_logits.gather(1, x) * (g @ hidden[:, :, None])[..., 0]).sum(dim=1)   # (n,)
    return total


def spearman(x, y):
    """Spearman's rank correlation of x and y (N,); ties share their mean rank; NaN if x or y is constant."""
    ranks = []
    for values in (x, y):
        _, place, count = values.unique(return_inverse=True, return_counts=True)    # (N,) and (distinct values,)
        ranks.append((count.cumsum(0) - (count - 1) / 2).double()[place])           # (N,)
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def bootstrap(units, statistic, resamples=200):
    """statistic(units) and its 95% interval (value, low, high), by drawing whole units with replacement."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(units), (resamples, len(units)), generator=generator).tolist()
    values = torch.tensor([statistic([units[i] for i in draw]) for draw in draws])  # (resamples,)
    return statistic(units), *values.nanquantile(torch.tensor([0.025, 0.975])).tolist()


def norm_correlation(scores, norms, chosen, group_size=None):
    """Spearman of scores with norms (B, T) over the chosen tokens: (value, low, high).

    Over the whole batch, groups resampled; without group_size averaged over single answers of 5 tokens or more.
    """
    rows = group_size or 1
    units = [(s[c], n[c]) for s, n, c in zip(scores.split(rows), norms.split(rows), chosen.split(rows)) if c.any()]
    if group_size:
        return bootstrap(units, lambda drawn: spearman(*map(torch.cat, zip(*drawn)))) if units else (float("nan"),) * 3
    rho = [spearman(s, n) for s, n in units if len(s) >= 5]
    return bootstrap(rho, lambda drawn: float(torch.tensor(drawn).nanmean())) if rho else (float("nan"),) * 3


def update_cosines(model, tokens, live, weight, kept, temperature=1.0):
    """{name: cosine} of the updates from kept {name: (B, T)} and all tokens; weight (B, T) is omega x loss weight."""
    row, column = live.nonzero(as_tuple=True)                                       # (N,) each
    logits = model.logits(model(tokens)[row, column - 1])                           # (N, V)
    logprob, parameters = token_stats(logits / temperature, tokens[row, column])[0], list(model.parameters())

    def update(mask):
        total = (logprob * (weight * mask)[row, column]).sum()      # doubles: fp32 gave 1.03 with 10^8 parameters
        return torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters, retain_graph=True)]).double()

    whole = update(live)
    return {name: float(torch.cosine_similarity(update(mask), whole, dim=0)) for name, mask in kept.items()}


def measure(run):
    """A batch of a run (train.load_run): Rollout, rewards (P, G), advantages (B,), omega without KL, norms (B, T)."""
    c, generator = run.config, torch.Generator(run.device).manual_seed(0)
    rollout, _, rewards = run.grade(run.next_problems(c.prompts), c.group_size, c.temperature, generator)
    A, live = group_advantages(rewards, c.loss != "dr_grpo").flatten(), rollout.answer_mask     # (B,), (B, T)
    omega = A[:, None] * live                                                       # (B, T) first update: r = 1
    norms = parameter_grad_norms(run.model, rollout.tokens, live & (omega != 0), omega, c.temperature)   # (B, T)
    return rollout, rewards, A, omega, norms


def report(run):
    """Print what each selection keeps of one batch, and how well each score stands in for the true gradient norm."""
    rollout, rewards, A, omega, norms = measure(run)
    G, E, sampled, wrong, dead = (run.config.group_size, rollout.entropy, rollout.answer_mask,
                                  (rewards.flatten() == 0)[:, None], (A == 0)[:, None])
    live, draw = sampled & ~dead, torch.Generator(run.device).manual_seed(0)
    scores = {name: token_scores(name, E, omega, rollout.logit_grad_norm, draw)
              for name in ("random", "entropy", "gmts", "exact")} | {"true": norms}
    batch = {name: select_tokens(s, sampled) for name, s in scores.items()}
    kept = {p: {name: select_tokens(s, live, p) for name, s in scores.items()} for p in (0.05, 0.1, 0.2, 0.5)}

    print(f"{len(A)} answers, {int(sampled.sum())} tokens, {int(dead.sum()) // G} of {len(A) // G} groups dead.\n"
          "Under each answer the tokens kept at 20%: E by entropy alone, G by GMTS alone, # by both")
    one_of_each = {(i // G, float(A[i])): i for i in range(len(A)) if A[i] != 0}    # a right and a wrong one per group
    for i in list(one_of_each.values())[:4]:
        texts = [repr(run.tokenizer.decode([id]))[1:-1] for id in rollout.tokens[i][sampled[i]].tolist()]
        codes = (batch["entropy"][i] + 2 * batch["gmts"][i].int())[sampled[i]].tolist()
        lines = "".join(texts), "".join(" EG#"[code] * len(text) for code, text in zip(codes, texts))
        print(f"  reward {float(rewards.flatten()[i]):.0f}, advantage {float(A[i]):+.2f}")
        print("\n".join("    " + line[j:j + 110] for j in range(0, len(lines[0]), 110) for line in lines))

    print("\nSpearman correlation with the true norm |omega| ||grad log pi||, live groups only, [95% interval]\n"
          + " " * 20 + "".join(map("{:23}".format, ("in an answer", "over the batch", "where A > 0", "where A < 0"))))
    for among, title in ((live, ""), (select_tokens(E, live, 0.4), ", top 40% E")):
        for name in ("entropy", "gmts", "exact"):
            cells = [norm_correlation(scores[name], norms, among)] + [
                norm_correlation(scores[name], norms, among & side[:, None], G) for side in (A != 0, A > 0, A < 0)]
            print(f"{name + title:20}" + "".join(f"{f'{r:.3f} [{low:.3f}, {high:.3f}]':23}" for r, low, high in cells))

    print("\nBy score: share of the batch's top 20% in wrong answers, in dead groups.  In live groups alone: share of\n"
          "the true norm in the top 5%, 20%; cosine of the top 20%'s update with that of all tokens; which percentage\n"
          "of its top 10/20/50% another score keeps too\n" + " " * 10 + "".join(
              [f"{title:8}" for title in ("wrong", "dead", "5%", "20%", "cosine")] + [f"{name:13}" for name in scores]))
    weight = omega * loss_weights(sampled, sampled, "answer" if run.config.loss == "grpo" else "live")      # (B, T)
    cosines = update_cosines(run.model, rollout.tokens, live, weight, kept[0.2], run.config.temperature)
    for name, mask in batch.items():
        numbers = [(mask & wrong).sum() / mask.sum(), (mask & dead).sum() / mask.sum(),
                   *((norms * kept[p][name]).sum() / norms.sum() for p in (0.05, 0.2)), cosines[name]]
        overlaps = ["/".join(f"{100 * float((top[name] & top[b]).sum() / top[name].sum()):.0f}" for top in (
            kept[0.1], kept[0.2], kept[0.5])) for b in scores]
        print(f"{name:10}" + "".join(f"{float(x):<8.2f}" for x in numbers) + "".join(map("{:13}".format, overlaps)))


if __name__ == "__main__":
    import sys
    import train
    if len(sys.argv) != 2:
        sys.exit("usage: python gmts.py RUN, a folder that train.py wrote")
    try:
        loaded = train.load_run(sys.argv[1])
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"gmts.py: {error}")
    report(loaded)

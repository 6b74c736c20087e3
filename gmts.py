"""GMTS: gradient-magnitude-based token selection, and the GRPO/DAPO objective that it selects for.

The gradient of the objective of one sampled token is  omega * grad log pi  (`learning_coefficient`), and the entropy E of the policy at
that token stands in for the size of grad log pi.  So |E * omega| estimates how much a token would move the weights; GMTS trains on
the top 20% of the batch by that score (Lv, Zhang, Zhang 2026, arXiv 2608.30632).  Entropy alone (arXiv 2506.01939) ranks tokens well
inside one answer, but knows nothing of the advantage, so it cannot rank across answers.

Pure functions of plain tensors, torch only: this one file drops into another trainer.

Shapes: B answers, P prompts, G answers per prompt, T padded length, N tokens, V vocabulary.  Logarithms are natural (nats).
"""
import torch

MAX_LOG_RATIO = 20.0   # exp(20) = 5e8: beyond it a ratio says only "far away", and exp would overflow


def group_advantages(rewards, scale=True):
    """Advantages (P, G) of rewards (P, G): (R - mean) / std over the group, population std (GRPO, arXiv 2402.03300, sec. 4.1.2).

    A dead group, all of whose rewards are equal, gets exactly 0.  scale=False leaves out the std (Dr. GRPO, arXiv 2503.20783).
    ValueError if G < 2: a group of one has nothing to compare with.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be (P, G) with at least 2 answers per prompt, not {tuple(rewards.shape)}")
    rewards = rewards.float()
    dead = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)                     # (P, 1)
    centred = rewards - rewards.mean(dim=1, keepdim=True)                           # (P, G)
    if scale:
        centred = centred / rewards.std(dim=1, correction=0, keepdim=True)          # (P, G)
    # Compared, not subtracted: the mean of eight times 0.1 is not 0.1 in fp32, and the tiny rest over a tiny std would be noise.
    return torch.where(dead, 0.0, centred)


def token_stats(logits, targets):
    """What one softmax tells about each sampled token: logprob, entropy and logit_grad_norm, each (N,) in fp32.

    logits (N, V), already divided by the sampling temperature; targets (N,) the sampled ids.  logit_grad_norm is
    || d log p_y / dz || = || onehot(y) - p ||, the exact norm of the gradient with respect to the logits (arXiv 2506.12912).
    """
    z = logits.float()
    z = z - z.max(dim=-1, keepdim=True).values.detach()                             # (N, V)
    log_total = z.logsumexp(dim=-1)                                                 # (N,)
    y = targets[:, None]
    logprob = z.gather(-1, y)[:, 0] - log_total                                     # (N,)
    p = (z - log_total[:, None]).exp()                                              # (N, V)
    # A masked logit is -inf with p = 0; clamped, 0 * z is 0 and so is its gradient, where 0 * -inf would be NaN.
    entropy = log_total - (p * z.clamp(min=torch.finfo(z.dtype).min)).sum(dim=-1)   # (N,)
    # p_y - 1 as expm1 of the log-prob: near p_y = 1 the textbook form 1 - 2 p_y + sum p^2 cancels to noise.
    residual = p.scatter(-1, y, torch.expm1(logprob)[:, None])                      # (N, V)
    return logprob, entropy.clamp(min=0.0), residual.norm(dim=-1)


def learning_coefficient(logprobs, old_logprobs, advantages, clip_low, clip_high, ref_logprobs=None, beta=0.0):
    """omega (B, T), the scalar that multiplies grad log pi of each token in the gradient of `policy_objective` (GMTS, eq. for omega).

        omega = r A I(r, A) + beta (pi_ref / pi - 1),   r = pi / pi_old,
        I = 0 if (A > 0 and r > 1 + clip_high) or (A < 0 and r < 1 - clip_low), else 1

    logprobs, old_logprobs, ref_logprobs (B, T); advantages (B,).
    """
    log_ratio, A = logprobs - old_logprobs, advantages[:, None]                     # (B, T), (B, 1)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()                    # (B, T)
    clipped = ((A > 0) & (ratio > 1 + clip_high)) | ((A < 0) & (ratio < 1 - clip_low)) | (log_ratio.abs() > MAX_LOG_RATIO)
    omega = torch.where(clipped, 0.0, ratio * A)                                    # (B, T)
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

    "entropy" is the 80/20 rule's E, "gmts" |E * omega|, "exact" |omega| * logit_grad_norm, "all" 1, and "random" a uniform draw from
    `generator`, the control that says what the choice itself is worth.  ValueError for another name.
    """
    if selection == "random":
        return 1 - torch.rand(entropy.shape, generator=generator, device=entropy.device)   # (0, 1]: a score of 0 is never kept
    if selection not in SELECTIONS:
        raise ValueError(f"selection must be one of random, {', '.join(SELECTIONS)}, not {selection!r}")
    return SELECTIONS[selection](entropy, omega, logit_grad_norm).detach()


def select_tokens(scores, answer_mask, keep=0.2, scope="batch", group_size=None, bottom=False):
    """kept (B, T) bool: the share `keep` of the live tokens with the highest scores, counted within each scope.

    scores (B, T), answer_mask (B, T) bool.  Of the n live tokens of a scope ("batch", "group" of `group_size` neighbouring rows, or
    "answer") exactly floor(keep * n + 1e-9), at least 1, are kept; fewer only where fewer score above 0.  Ties go to the lowest
    index and NaN is never kept.  bottom=True keeps as many of the LOWEST scores instead, zeros included (the paper's control).
    """
    rows = {"batch": scores.shape[0], "group": group_size, "answer": 1}.get(scope)
    if not rows or scores.shape[0] % rows:
        raise ValueError(f"scope {scope!r} with group_size {group_size} does not divide {scores.shape[0]} answers")
    if not 0 < keep <= 1:
        raise ValueError(f"keep must be above 0 and at most 1, not {keep}")
    x = scores.float().reshape(scores.shape[0] // rows, -1)                         # (scopes, rows * T)
    live = answer_mask.reshape(x.shape)                                             # (scopes, rows * T)
    if x.numel() == 0:
        return torch.zeros_like(answer_mask)
    eligible = live & ~x.isnan() if bottom else live & (x > 0)                      # NaN > 0 is false
    x = torch.where(eligible, -x if bottom else x, float("-inf"))
    n = live.sum(dim=1, keepdim=True)                                               # (scopes, 1)
    k = torch.maximum((keep * n.double() + 1e-9).floor().long(), n.clamp(max=1))    # 1e-9: 0.07 * 100 is 7.000000000000001, not 6.99
    # The k-th largest value decides; what equals it is kept from the left until k is reached.
    threshold = x.sort(dim=1, descending=True).values.gather(1, (k - 1).clamp(min=0))   # (scopes, 1)
    above, tied = x > threshold, eligible & (x == threshold)
    tied &= tied.cumsum(dim=1) <= k - above.sum(dim=1, keepdim=True)
    return ((above & eligible) | tied).reshape(answer_mask.shape)


def policy_objective(logprobs, old_logprobs, advantages, clip_low, clip_high, ref_logprobs=None, beta=0.0):
    """The objective l (B, T) of each token, to be maximised (PPO-clip with DAPO's two bounds, arXiv 2503.14476, eq. 8, minus KL).

        l = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - beta (pi_ref / pi - log(pi_ref / pi) - 1)

    The KL term is part of l, so it acts on the kept tokens only, as in the paper's text.  No gradient reaches the reference.
    """
    A = advantages[:, None]                                                         # (B, 1)
    ratio = (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()   # (B, T)
    objective = torch.minimum(ratio * A, ratio.clamp(1 - clip_low, 1 + clip_high) * A)      # (B, T)
    if beta:
        log_ref = (ref_logprobs.detach() - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)   # (B, T)
        objective = objective - beta * (torch.expm1(log_ref) - log_ref)
    return objective


def loss_weights(kept, answer_mask, divisor="kept", max_new_tokens=None):
    """The weight (B, T) of each token's objective in the loss, 0 where it is not kept; fixed BEFORE any split into micro-batches.

    "kept": 1 / kept tokens (GMTS, DAPO); "live": 1 / sampled tokens; "answer": 1 / (B |o_i|) with |o_i| the tokens of the answer
    (GRPO); "constant": 1 / (B max_new_tokens) (Dr. GRPO, which has no length in the divisor).
    """
    B = kept.shape[0]
    total = {"kept": lambda: kept.sum(), "live": lambda: answer_mask.sum(), "constant": lambda: torch.tensor(B * max_new_tokens),
             "answer": lambda: B * answer_mask.sum(dim=1, keepdim=True)}[divisor]()
    return kept / total.clamp(min=1)


def policy_loss(objective, kept, answer_mask, divisor="kept", max_new_tokens=None):
    """The scalar to minimise: minus the weighted sum of the kept tokens' objective (B, T); see `loss_weights` for the divisors."""
    weights = loss_weights(kept, answer_mask, divisor, max_new_tokens)              # (B, T)
    return -(weights * torch.where(kept, objective, 0.0)).sum()                     # where: NaN * 0 would be NaN

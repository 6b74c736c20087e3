"""What makes a step quick, asserted without a clock: what is computed, how often, and that it changes no result."""
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import rollout as rollout_module
import train
from model import GPT, SIZES, GPTConfig, KVCache, byte_tokenizer
from rollout import Rollout, generate
from verify import make_problems

TINY = GPTConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, vocab_size=30, embedding_rows=32, max_position_embeddings=64)


def batch_of(B, T, start):
    """A Rollout of random tokens whose answers begin at `start` and fill the rest."""
    tokens, mask, zeros = torch.randint(0, 30, (B, T)), torch.zeros(B, T, dtype=torch.bool), torch.zeros(B, T)
    mask[:, start:] = True
    return Rollout(tokens, torch.full((B,), start), mask, zeros, zeros, zeros, torch.zeros(B, dtype=torch.bool))


def make_run(**flags):
    return train.Run(train.Config(device="cpu", **flags), GPT(TINY), None, "")


def test_compile_serves_all_lengths_and_row_counts_with_one_graph():
    model, counter = GPT(TINY), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=True, backend=counter)
    for B, T in ((5, 40), (7, 39), (8, 12), (3, 25), (64, 63)):
        tokens = torch.randint(0, 30, (B, T))
        torch.testing.assert_close(compiled(tokens), model(tokens))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_compiled_decoding_gives_the_same_answers_and_compiles_once_and_once_for_a_single_row():
    model, counter = GPT(TINY), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=True, backend=counter)
    for prompts, group_size, new in (([[3, 4, 5], [6]], 9, 40), ([[7] * 9], 5, 17), ([[8], [9, 3], [4] * 7], 4, 50)):
        draws = [torch.Generator().manual_seed(0) for _ in range(2)]
        plain, fast = (generate(model, prompts, group_size, new, (0, 1, 2), 1.0, 1.0, draw, forward)
                       for draw, forward in zip(draws, (None, compiled)))
        assert torch.equal(plain.tokens, fast.tokens) and torch.equal(plain.finished, fast.finished)
        torch.testing.assert_close(plain.logprobs, fast.logprobs)
    assert 1 <= counter.frame_count <= 2
    torch._dynamo.reset()


def test_a_run_decodes_through_its_compiled_forward():
    run, sizes = make_run(max_new_tokens=9), []
    run.tokenizer, run.template = byte_tokenizer(), train.TEMPLATES["bytes"]
    run.model = GPT(SIZES["tiny"])
    run.forward = lambda tokens, cache: sizes.append(len(tokens)) or run.model(tokens, cache)
    run.grade(make_problems("math", 1, 3, 0), 4, 1.0, None)
    assert sizes[0] == 12 and 1 <= len(sizes) <= 8          # the first of nine tokens needs the prompts alone


def test_update_through_a_wrapped_forward():
    run = make_run()
    run.forward = torch.compile(run.model, dynamic=True, backend="eager")
    batch, kept = batch_of(4, 20, 5), torch.rand(4, 20) < 0.3
    assert train.update(run, batch, kept & batch.answer_mask, torch.ones(4), torch.zeros(4, 20))["grad_norm"] > 0
    torch._dynamo.reset()


def test_update_computes_only_what_a_kept_token_needs(monkeypatch):
    run, batch = make_run(), batch_of(6, 30, 5)
    kept = torch.zeros(6, 30, dtype=torch.bool)
    kept[1, 7] = kept[4, 11] = kept[4, 20] = True           # rows 0, 2, 3, 5 have no kept token
    positions, scored, logits = [], [], run.model.logits
    run.forward = lambda tokens: positions.append(tokens.numel()) or run.model(tokens)
    monkeypatch.setattr(run.model, "logits", lambda hidden: scored.append(len(hidden)) or logits(hidden))
    monkeypatch.setattr(train, "budgets", lambda model: (1, 1, ""))         # one row at a time
    train.update(run, batch, kept, torch.ones(6), torch.zeros(6, 30))
    assert sorted(positions) == [7, 20] and sorted(scored) == [1, 2]


def test_finished_rows_leave_and_the_rest_does_not_notice(monkeypatch):
    model, rows = GPT(TINY), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda tokens, cache=None: rows.append(len(tokens)) or forward(tokens, cache))
    result = generate(model, [[3, 4, 5], [6]], 16, 40, (0, 1, 2), generator=torch.Generator().manual_seed(0))
    assert rows[1] == 32 and rows[-1] < 12 and sorted(rows[1:], reverse=True) == rows[1:]
    with torch.no_grad():
        scores = rollout_module.score(model, result)        # computed anew, without a cache
    torch.testing.assert_close(scores[0], result.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores[1], result.entropy, atol=1e-5, rtol=1e-5)


def test_kept_rows_of_a_cache_keep_their_text():
    model, tokens = GPT(TINY), torch.randint(0, 30, (6, 8))
    order = torch.tensor([0, 5, 2, 4])                      # rows 1 and 3 leave, the last rows take their places
    with torch.no_grad():
        cache = KVCache(TINY, torch.tensor([0, 1, 2, 3, 4, 5]), 9)
        model(tokens, cache)
        cache.keep_rows(order)
        more = model(tokens[order, :1], cache)
        alone = KVCache(TINY, torch.tensor([0, 1, 2, 3, 4, 5])[order], 9)
        model(tokens[order], alone)
        torch.testing.assert_close(more, model(tokens[order, :1], alone))


@pytest.mark.parametrize("heads", (1, 2, 4))
def test_one_token_without_a_cache(heads):
    config = GPTConfig(**{**vars(TINY), "num_key_value_heads": heads})
    model, tokens = GPT(config), torch.randint(0, 30, (3, 5))
    torch.testing.assert_close(model(tokens[:, :1]), model(tokens)[:, :1])

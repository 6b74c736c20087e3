"""The README's subclass of TRL's GRPOTrainer, as it stands there; skipped where trl is not installed."""
import os
import re
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
trl = pytest.importorskip("trl")
pytest.importorskip("safetensors")

import tiny_run
from gmts import learning_coefficient, select_tokens
from model import GPT

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.search(r"```python\n(from trl import.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]


@pytest.fixture(scope="module")
def trainer_class():
    names = {}
    exec(BLOCK, names)
    return names["GMTSTrainer"]


@pytest.fixture
def trainer(trainer_class, tmp_path):
    """Two steps of 16 answers of a tiny random model that our own save_pretrained wrote; the reward is a coin."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    GPT(tiny_run.SMALL).save_pretrained(tmp_path / "model")

    def coin(completions, **columns):
        return [tiny_run.coin(text, None) for text in completions]

    config = trl.GRPOConfig(
        output_dir=str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=16, num_generations=4,
        max_completion_length=12, learning_rate=1e-2, top_entropy_quantile=0.2, epsilon_high=0.28, use_cpu=True,
        bf16=False, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True)
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(tmp_path / "model"), reward_funcs=coin, args=config,
        train_dataset=Dataset.from_list([{"prompt": f"{i} + {i} = ?"} for i in range(8)]),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "model"))


def test_it_has_as_many_lines_as_the_readme_says():
    lines = BLOCK.splitlines()
    assert len(lines) <= 32 and max(map(len, lines)) <= 120
    assert f"{len(lines)} lines swap the score" in README.read_text(encoding="utf-8")


def test_two_steps_keep_what_gmts_keeps(trainer):
    calls, before = [], {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    select = type(trainer).get_high_entropy_mask

    def watched(entropies, mask, threshold):
        kept = select(trainer, entropies, mask, threshold)
        calls.append((entropies.detach(), mask.bool(), trainer.batch["advantages"], kept))
        return kept
    trainer.get_high_entropy_mask = watched
    trainer.train()
    assert trainer.state.global_step == 2 and len(calls) == 2
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert any((p != before[name]).any() for name, p in trainer.model.named_parameters())
    for entropies, mask, advantages, kept in calls:
        assert (advantages != 0).any() and not kept[advantages == 0].any() and not (kept & ~mask).any()
        assert kept.sum() == int(0.2 * mask.sum() + 1e-9)
        scores = (entropies * advantages[:, None]).abs()        # r = 1: TRL updates once on what it has sampled
        assert scores[kept].min() >= scores[mask & ~kept].max()


def test_a_ratio_that_is_clipped_is_not_kept(trainer):
    logprobs, mask = -torch.rand(4, 10), torch.ones(4, 10, dtype=torch.long)
    old = logprobs - torch.linspace(0.0, 0.6, 10)               # above log 1.28 = 0.247 from the fifth token on
    trainer.logprobs, trainer.batch = logprobs, {"old_per_token_logps": old, "advantages": torch.ones(4)}
    kept = trainer.get_high_entropy_mask(torch.rand(4, 10) + 0.1, mask, 0.8)
    omega = learning_coefficient(logprobs, old, torch.ones(4), 0.2, 0.28)
    assert kept.sum() == 8 and not kept[omega == 0].any() and not kept[:, 4:].any()


def test_entropy_selection_is_trls_own_mask(trainer, tried):
    """TRL keeps what reaches a quantile, interpolated between the tokens: of n tokens 1 + floor(0.2 (n - 1)).  That is
    our floor(0.2 n) where 0.2 n is a whole number and one token more elsewhere."""
    trainer.selection = "entropy"
    theirs_of = lambda entropy, mask: trl.GRPOTrainer.get_high_entropy_mask(trainer, entropy, mask, 1 - 0.2)
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        B, T = torch.randint(1, 20, (2,), generator=generator).tolist()
        lengths = torch.randint(1, T + 1, (B, 1), generator=generator)
        mask = (torch.arange(T) < lengths).long()
        n = int(mask.sum())
        entropy = torch.randperm(B * T, generator=generator).view(B, T) / 100 + 0.01        # no ties
        trainer.logprobs, trainer.batch = -entropy, {"advantages": torch.randn(B, generator=generator)}
        ours, theirs = trainer.get_high_entropy_mask(entropy, mask, 0.8), theirs_of(entropy, mask)
        if n % 5 == 0:
            assert torch.equal(ours, theirs)
        elif n % 5 > 1:             # at n % 5 == 1 the quantile is a token's own value, and its rounding decides
            assert torch.equal(select_tokens(entropy, mask.bool(), (n // 5 + 1) / n), theirs)
        tried["masks compared with TRL's"] += 1

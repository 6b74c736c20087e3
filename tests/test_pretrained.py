"""train.py on model folders: default templates, problem files, what does not fit, and no safetensors."""
import json
from dataclasses import replace

import pytest
import torch

import model as model_module
import tiny_run
import train
from model import BYTE_FILES, GPT

pytest.importorskip("safetensors")
LLAMA3 = ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{question}<|eot_id|>"
          "<|start_header_id|>assistant<|end_header_id|>\n\n")
SPECIALS = {
    "bytes": ["<|eos|>", "<|question|>", "<|answer|>"],
    "chat": ["<|im_end|>", "<|im_start|>", "<|endoftext|>"],
    "base": ["<|endoftext|>"],
    "base of a chat family": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama 3": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
}


def folder_with(path, specials):
    """A folder of a tiny model whose answers end with the first of the special tokens."""
    model = GPT(replace(tiny_run.SMALL, vocab_size=256 + len(specials), max_position_embeddings=400))
    file = json.loads(BYTE_FILES["tokenizer.json"])
    file["added_tokens"] = [file["added_tokens"][0] | {"id": 256 + i, "content": s} for i, s in enumerate(specials)]
    model.files = {"tokenizer.json": json.dumps(file)}
    model.save_pretrained(path)
    return str(path)


@pytest.fixture
def math_files(tmp_path):
    """MATH-style problems to train on, one of them too long, and bare answers to evaluate with."""
    problems = [{"problem": f"${i} + {i}$", "level": "1", "solution": f"So $\\boxed{{{2 * i}}}$."} for i in range(20)]
    problems[3]["problem"] += " and on" * 60
    held_out = [{"question": f"{i} + {i}", "answer": str(2 * i)} for i in range(20, 30)]
    for name, rows in (("train", problems), ("test", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ["--data", str(tmp_path / "train.jsonl"), "--eval_data", str(tmp_path / "test.jsonl")]


@pytest.mark.parametrize("kind", SPECIALS)
def test_default_templates_follow_the_token_that_ends_an_answer(tmp_path, kind):
    run = train.prepare(train.Config(model=folder_with(tmp_path / "folder", SPECIALS[kind])))
    assert run.template == train.TEMPLATES[kind if kind in train.TEMPLATES else "base"]
    assert (max(run.encode("<|im_start|>")) > 255) == (kind in ("bytes", "chat"))       # the template's tokens alone


def test_any_special_token_in_a_template(tmp_path):
    run = train.prepare(train.Config(model=folder_with(tmp_path / "folder", SPECIALS["llama 3"]), template=LLAMA3))
    assert [id for id in run.encode("<|eot_id|>?") if id > 255] == [257, 258, 259, 256, 258, 259]


def test_a_run_on_files_and_a_folder(tmp_path, math_files, capsys):
    folder = folder_with(tmp_path / "folder", SPECIALS["chat"])
    flags = [*tiny_run.FLAGS, "--steps", "2", "--model", folder, "--out", str(tmp_path / "run"), *math_files]
    assert train.main(flags) == 0
    out = capsys.readouterr().out
    assert "1 problems have more than 388 tokens and are left out" in out and out.count("GB at most: weights") == 1
    samples = (tmp_path / "run/samples.txt").read_text(encoding="utf-8")
    assert "gold '4" in samples or "gold '5" in samples
    run = train.load_run(tmp_path / "run")
    assert run.step == 2 and len(run.problems) == 19 and run.template == train.TEMPLATES["chat"]


def test_without_safetensors_one_line_and_nothing_written(tmp_path, monkeypatch, capsys):
    folder = folder_with(tmp_path / "folder", SPECIALS["base"])
    monkeypatch.setattr(model_module, "find_spec", lambda name: None)
    assert train.main(["--model", folder, "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == "train.py: model folders need safetensors: pip install safetensors\n"
    assert not (tmp_path / "run").exists()


class NoCompiler(torch._dynamo.exc.BackendCompilerFailed):
    def __init__(self):
        RuntimeError.__init__(self, "backend='inductor' raised:\nInvalidCxxCompiler: none found\n\nSet TORCH_LOGS\n")


@pytest.mark.parametrize("error, says", [
    (torch.OutOfMemoryError("out of memory"), "out of memory"),
    (NoCompiler(), "backend='inductor' raised: InvalidCxxCompiler: none found")])
def test_no_room_on_the_device_and_no_compiler_are_one_line(monkeypatch, capsys, error, says):
    def fail(config):
        raise error
    monkeypatch.setattr(train, "compare", fail)
    assert train.main([]) == 1 and capsys.readouterr().err == f"train.py: {says}\n"

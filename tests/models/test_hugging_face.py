"""Models of transformers and adapters of peft: built from a config, trained, sent, saved, loaded again; nothing is downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

import transformers  # noqa: E402

import undrift  # noqa: E402
from undrift import cli  # noqa: E402
from undrift.core.errors import BadRunFolder, BadSetting, UnknownName  # noqa: E402
from undrift.core.lora import Lora, parse_lora  # noqa: E402
from undrift.core.names import names  # noqa: E402
from undrift.core.pinned import pin  # noqa: E402
from undrift.data.load import load_dataset  # noqa: E402
from undrift.deploy.node import build_client, check_allowed  # noqa: E402
from undrift.deploy.settings import Plan  # noqa: E402
from undrift.jobs.registry import algorithm_class, build_model  # noqa: E402
from undrift.jobs.run import build_simulation  # noqa: E402
from undrift.models._adapters import with_lora  # noqa: E402

# 2026-11: peft 0.21 asks transformers 5.23 in a way that is deprecated, and mends what it warns of
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:fan_in_fan_out")
T, WORDS, CLASSES = 6, 17, 3
WIDE = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": WORDS,
        "n_positions": 8,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "llama": WIDE | {"vocab_size": WORDS, "num_key_value_heads": 1, "max_position_embeddings": 8},
    "bert": WIDE | {"vocab_size": WORDS, "max_position_embeddings": 8},
    "vit": WIDE | {"image_size": 8, "patch_size": 4},
}
PLACES = {"vit": ",targets=q_proj+v_proj"}  # for the others peft knows them
KINDS = {"gpt2": "next", "llama": "next", "bert": "text", "vit": "picture"}
SMALL: dict[str, Any] = {
    "rounds": 2, "clients": 4, "cohort": 2, "steps": 2, "batch": 4, "lr": 0.3, "partition": "iid", "dtype": "float64",
    "execution": "stacked",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers says on its own log how it makes a config of a config."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def config(folder: Path, kind: str, **more: Any) -> str:
    file = folder / f"{kind}.json"
    file.write_text(json.dumps({"model_type": kind, **CONFIGS[kind], **more}))
    return f"hf:{file}"


def samples(kind: str) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    words = random.integers(0, WORDS, (60, T + 1))
    x, y = words[:, :-1], words[:, 1:] if KINDS[kind] == "next" else words[:, 0] % CLASSES
    if KINDS[kind] == "picture":
        x = random.normal(size=(60, 3, 8, 8))
    return x[:40], y[:40], x[40:], y[40:]


def run(kind: str, folder: Path, **settings: Any) -> Any:
    return undrift.run(
        model=config(folder, kind),
        data=samples(kind),
        **(SMALL | {"lora": f"r=2,alpha=8{PLACES.get(kind, '')}"} | settings),
    )


def base(kind: str, folder: Path) -> nn.Module:
    """The model that a run begins with, under its adapters."""
    shape = (3, 8, 8) if KINDS[kind] == "picture" else (T,)
    classes = WORDS if KINDS[kind] == "next" else CLASSES
    return build_model(config(folder, kind), shape, classes, 0, int(KINDS[kind] == "next")).double().eval()


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_are_trained_sent_and_loaded_by_peft(kind: str, tmp_path: Path) -> None:
    result = run(kind, tmp_path, out=tmp_path / "run")
    plain = run(kind, tmp_path, execution="debug")
    for name, tensor in plain.model.items():
        close = (
            {"rtol": 1e-10, "atol": 1e-12} if kind != "llama" else {"rtol": 1e-5, "atol": 1e-8}
        )  # has parts in float32
        torch.testing.assert_close(result.model[name], tensor, **close)
    fresh = base(kind, tmp_path)
    before = {f"base_model.model.{name}": tensor for name, tensor in fresh.state_dict().items()}
    inputs = torch.from_numpy(samples(kind)[2])
    with torch.no_grad():
        untrained = fresh(inputs).logits
        loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "run" / "adapter").double().eval()
        found = loaded(inputs).logits
    ours = with_lora(base(kind, tmp_path), parse_lora(f"r=2,alpha=8{PLACES.get(kind, '')}")).double().eval()
    assert ours.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"), strict=True)
    assert torch.equal(found, ours(inputs).logits) and (found - untrained).abs().max() > 1e-4
    # What is sent is what is trained: the adapters, and the head of a classifier.
    trained = [p for p in ours.parameters() if p.requires_grad]
    assert result.records[-1]["bytes_up"] == 2 * 8 * sum(p.numel() for p in trained)
    assert result.about["parameters"] == sum(p.numel() for p in trained)
    moved = {
        name for name, tensor in before.items() if name in result.model and not torch.equal(result.model[name], tensor)
    }
    assert not moved, "the frozen model has moved"


def test_a_round_is_a_loop_over_peft_models(tmp_path: Path) -> None:
    """FedAvg of one step on all samples of each client, computed with the model of peft itself."""
    x, y, *test = samples("gpt2")
    silent = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    clients = [(x[n * 10 : n * 10 + 10], y[n * 10 : n * 10 + 10]) for n in range(4)]
    whole = SMALL | {"rounds": 1, "cohort": 4, "steps": 1, "batch": 10, "partition": "sites"}
    file = config(tmp_path, "gpt2", **silent)
    result = undrift.run(model=file, data=(clients, tuple(test)), lora="r=2,alpha=8", **whole)
    still = undrift.run(model=file, data=(clients, tuple(test)), lora="r=2,alpha=8", **(whole | {"lr": 1e-30}))
    model = with_lora(base("gpt2", tmp_path), Lora(2, 8.0)).double()
    model.load_state_dict(still.model)  # how a run begins
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    mean = {n: torch.zeros_like(p) for n, p in trained.items()}
    for ids, next_ids in clients:
        out = model(input_ids=torch.from_numpy(ids), use_cache=False).logits
        loss = F.cross_entropy(out.flatten(0, 1), torch.from_numpy(next_ids).flatten())
        for name, g in zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True):
            mean[name] += g / 4
    for name, p in trained.items():
        torch.testing.assert_close(result.model[name], (p - 0.3 * mean[name]).detach(), rtol=1e-10, atol=1e-12)


def test_models_and_adapters_of_ones_own(tmp_path: Path) -> None:
    """A model object of transformers with --lora, and one of peft, with inputs by name; neither is changed."""
    x, y, x_test, y_test = samples("llama")
    mask = np.ones_like(x)
    mask[:, -1] = 0
    parts = ({"input_ids": x, "attention_mask": mask}, y, {"input_ids": x_test, "attention_mask": mask[:20]}, y_test)
    torch.manual_seed(0)
    eager = {"attn_implementation": "eager", "use_cache": False}  # with which masks can be stacked
    own = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIGS["llama"], **eager)).double()
    ready = peft.get_peft_model(own, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    given = {n: p.detach().clone() for n, p in ready.named_parameters()}
    stacked, alone = (
        undrift.run(model=ready, data=parts, **(SMALL | {"execution": how})) for how in ("stacked", "debug")
    )
    assert all(torch.equal(p, given[n]) for n, p in ready.named_parameters())
    for name, tensor in alone.model.items():
        torch.testing.assert_close(stacked.model[name], tensor, rtol=1e-5, atol=1e-8)  # has parts in float32
        assert torch.equal(tensor, given[name]) != ("lora_" in name), name
    with pytest.raises(BadSetting, match="has adapters already; leave lora out"):
        undrift.run(model=ready, data=parts, lora="r=2", **SMALL)
    masked = undrift.run(model=ready, data=samples("llama"), **SMALL)
    assert masked.records[-1]["loss"] != stacked.records[-1]["loss"], "the mask is seen"


def test_resume_compress_and_the_pinned_config(tmp_path: Path) -> None:
    """A run goes on bit for bit, without being told its model again; a changed config is refused."""
    settings = {"lora": "r=2", "rounds": 4, "compress": "topk:4", "algorithm": "ffa-lora", "checkpoint_every": 2}
    whole = run("gpt2", tmp_path, out=tmp_path / "whole", **settings)
    run("gpt2", tmp_path, out=tmp_path / "cut", **(settings | {"rounds": 2}))
    cut = undrift.run(out=tmp_path / "cut", data=samples("gpt2"), rounds=4, resume=True)
    assert [r["train_loss"] for r in cut.records] == [r["train_loss"] for r in whole.records]
    assert all(torch.equal(cut.model[name], tensor) for name, tensor in whole.model.items())
    full = run("gpt2", tmp_path, **(settings | {"compress": ""}))
    assert whole.records[-1]["bytes_up"] < full.records[-1]["bytes_up"] / 2
    assert whole.config.model.startswith(f"hf:{tmp_path}/gpt2.json#")
    config(tmp_path, "gpt2", n_head=1)
    with pytest.raises(BadSetting, match="is not what this run began with: its checksum is"):
        undrift.run(out=tmp_path / "cut", data=samples("gpt2"), rounds=5, resume=True)
    with pytest.raises(BadRunFolder, match="holds another run: its model is"):
        undrift.run(out=tmp_path / "cut", data=samples("gpt2"), model=f"hf:{tmp_path}/gpt2.json", rounds=5, resume=True)


def test_a_folder_with_weights_is_read_and_never_unpickled(tmp_path: Path) -> None:
    folder = tmp_path / "trained"
    trained = base("bert", tmp_path).float()
    trained.save_pretrained(folder)  # type: ignore[operator]
    found = build_model(pin(f"hf:{folder}"), (T,), CLASSES, 1)
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in found.state_dict().items())
    drawn = build_model(f"hf:{folder / 'config.json'}", (T,), CLASSES, 1)
    assert not torch.equal(drawn.state_dict()["classifier.weight"], trained.state_dict()["classifier.weight"])
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(BadSetting, match="has no weights .*safetensors"):
        build_model(f"hf:{folder}", (T,), CLASSES, 1)


def test_a_config_runs_no_code_but_transformers_own(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: pass\n")
    code = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    spec = config(tmp_path, "gpt2", auto_map=code)
    build_model(spec, (T,), WORDS, 0, 1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt3", "auto_map": code}))
    with pytest.raises(UnknownName, match="unknown model_type 'gpt3'"):
        build_model(f"hf:{tmp_path / 'config.json'}", (T,), WORDS, 0, 1)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no config.json of transformers"), ("[]", "names no model_type"), ("{}", "names no model_type"),
        ('{"model_type": "gpt2", "n_embd": "wide"}', "is no config of gpt2|model function"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadSetting, match=said):
        build_model(f"hf:{tmp_path / 'config.json'}", (T,), WORDS, 0, 1)


def test_what_does_not_fit_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadSetting, match="there is no .*nowhere.json for --model hf:"):
        build_model(f"hf:{tmp_path}/nowhere.json", (T,), WORDS, 0, 1)
    with pytest.raises(BadSetting, match="the data have 40 tokens, but the config's vocab_size is 17"):
        build_model(config(tmp_path, "gpt2"), (T,), 40, 0, 1)
    with pytest.raises(BadSetting, match="the texts have 20 tokens, but the config has places for 8"):
        build_model(config(tmp_path, "gpt2"), (20,), WORDS, 0, 1)
    with pytest.raises(BadSetting, match="transformers has no vit with the head .*SequenceClassification"):
        build_model(config(tmp_path, "vit"), (T,), CLASSES, 0)
    with pytest.raises(BadSetting, match="takes pictures"):
        build_model(config(tmp_path, "vit"), (3, 8, 8), CLASSES, 0, 2)
    x, _, x_test, _ = samples("gpt2")
    with pytest.raises(BadSetting, match="the labels repeat the inputs"):
        undrift.run(model=config(tmp_path, "gpt2"), data=(x, x, x_test, x_test), lora="r=2", **SMALL)
    with pytest.raises(BadSetting, match="peft finds no place for lora: .*such as --lora r=2,targets="):
        undrift.run(model="mlp", lora="r=2", rounds=1)
    assert cli.main(["run", "--model", f"hf:{tmp_path}/nowhere.json"]) == 2
    assert capsys.readouterr().err.startswith("undrift: there is no ")


@pytest.mark.parametrize(
    ("text", "said"),
    [("r", "not NAME=VALUE"), ("rank=8", "part of lora"), ("r=x", "must be a number"), ("r=0", "r >= 1"),
     ("dropout=1", "r >= 1")],
)  # fmt: skip
def test_a_wrong_lora_is_refused(text: str, said: str) -> None:
    with pytest.raises((BadSetting, UnknownName), match=said):
        parse_lora(text)


def deployed(folder: Path, **settings: Any) -> Plan:
    given = {
        "clients": 3,
        "cohort": 2,
        "rounds": 2,
        "dataset": "synthetic-text(roles=3, lines=12, length=6)",
        "steps": 2,
        "batch": 4,
    }
    given |= {"partition": "sites", "device": "cpu", "dtype": "float64", "lora": "r=2", "algorithm": "ffa-lora"}
    return Plan.of(given | {"model": config(folder, "gpt2", vocab_size=100)} | settings)


def test_a_deployed_client_builds_the_servers_model(tmp_path: Path) -> None:
    """The frozen part, which is never sent, is the same on both sides; a node reads a config only where it allows that."""
    plan = deployed(tmp_path)
    again = Plan.from_flat(plan.flat())
    assert again.run.model == plan.run.model and "#" in plan.run.model
    node = {"partition-id": 1, "state-dir": str(tmp_path / "states")}
    with pytest.raises(BadSetting, match='reads no model that the server names by a path.*allow="hf"'):
        check_allowed(plan.flat(), node)
    check_allowed(plan.flat(), node | {"allow": "hf"})
    server = build_simulation(plan.run, plan.alg, load_dataset(plan.run.dataset), plan.run.model, torch.device("cpu"))
    client = build_client(again, node)
    assert client.net.layout == server.net.layout
    theirs = client.net.original.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in server.net.original.state_dict().items())
    config(tmp_path, "gpt2", vocab_size=100, n_layer=2)
    with pytest.raises(BadSetting, match="is not what this run began with"):
        build_client(again, node)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in ("fedavg", "rolora") else pytest.mark.system) for n in names("algorithms")],
)
def test_every_method_trains_adapters_or_says_why_not(name: str, tmp_path: Path) -> None:
    text = "synthetic-text(roles=3, lines=12, length=6)"
    own = set(algorithm_class(name).__dataclass_fields__)
    fields: dict[str, Any] = (
        {"slots": 0} if "slots" in own else {"selector_model": "bag-of-words"} if "selector_model" in own else {}
    )
    settings = SMALL | {"clients": 3, "partition": "sites", "lr": 0.05, "set": fields}
    given = {"model": config(tmp_path, "gpt2", vocab_size=100), "lora": "r=2", "dataset": text, "algorithm": name}
    refused = {
        "moon": "made of blocks",
        "moonm": "made of blocks",
        "fedmlb": "made of blocks",
        "fedmlbm": "made of blocks",
    }
    if name in refused:
        with pytest.raises(BadSetting, match=refused[name]):
            undrift.run(**given, **settings)
        return
    result = undrift.run(**given, **settings)
    assert result.records[-1]["loss"] is not None and all(tensor.isfinite().all() for tensor in result.model.values())

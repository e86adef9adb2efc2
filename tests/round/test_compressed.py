"""Compressed uploads: against a plain loop with masks, for every method, stacked and pooled, resumed, and their bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference import dp as plain
from tests.reliability import counted
from tests.small import path, simulation
from undrift import cli
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.scaffold import Scaffold
from undrift.core.errors import BadSetting, UnknownName
from undrift.core.layout import MODEL, Vec
from undrift.core.names import names
from undrift.core.run_files import CHECKPOINTS
from undrift.core.trees import Nothing, leaves
from undrift.jobs.config import from_mapping
from undrift.jobs.registry import algorithm_class
from undrift.oracle.net import Net
from undrift.round.compressed import Uplink
from undrift.simulate.here import AskHere, Stacked
from undrift.simulate.personal_scores import personal_models

ROUNDS, SIZE = 6, 39  # of tests.small's network
SPECS = ["rbgs:5", "randk:5", "topk:5", "fp16", "int8", "int4"]


def compressed(spec: str, t: int, p: Tensor) -> Tensor:
    if spec == "fp16":
        return p.half().double()
    if spec in ("int8", "int4"):
        most = {"int8": 127, "int4": 7}[spec]
        scale = float((p.abs().max() / most).float())
        return (p / scale).round().clamp(-most, most) * scale
    mask = {"rbgs": plain.block_mask([SIZE], 5, 0), "randk": plain.random_mask([SIZE], 5, 0)}
    return torch.where(mask.get(spec.partition(":")[0], plain.top_mask([SIZE], 5))(t, p), p, 0.0)


@pytest.mark.parametrize("execution", ["stacked", "pool"])
@pytest.mark.parametrize("spec", SPECS)
def test_fedavg_equals_a_plain_loop(spec: str, execution: str) -> None:
    """Three of six clients in each round: the others' errors wait."""
    found = path(simulation(FedAvg(lr=0.1), cohort=3, compress=spec, execution=execution), ROUNDS)
    other, error = simulation(FedAvg(lr=0.1), cohort=3), {i: torch.zeros(SIZE, dtype=torch.float64) for i in range(6)}
    for t in range(ROUNDS):
        part = other.attendance(t)
        who, work = other.who(part), other.work(part)
        ask = AskHere(Stacked(3), work, other.clients)
        up = ask.train(other.alg, other.down(who), other.state.buffers, who).up  # without compression, from the same x
        d = other.net.without_padding(up.d, "model")
        sent = []
        for i, update in zip(part.ids.tolist(), d, strict=True):
            p = update + error[i]
            sent.append(compressed(spec, t, p))
            error[i] = p - sent[-1]
        x = other.state.x - F.pad(sum(sent) / 3, (0, other.net.layout.padding))
        assert float((found[t] - other.net.without_padding(x, "model")).norm() / x.norm()) < 1e-12
        other.state, other.t = other.state._replace(x=x), t + 1
        other.position[part.ids] += work.table.steps
    assert all(float(e.norm()) > 0 for e in error.values())


def can_be_compressed(name: str) -> bool:
    kind = algorithm_class(name)
    return kind.whole_uploads and not looks_at_single_uploads(kind) and name != "rolora"  # A and B go up in turn


SUMMED = [name for name in names("algorithms") if can_be_compressed(name)]


def made(name: str, **settings: Any) -> Any:
    return simulation(algorithm_class(name)(lr=0.1), cohort=6, **settings)


@pytest.mark.parametrize("name", names("algorithms"))
def test_every_summed_method(name: str) -> None:
    if name not in SUMMED:
        with pytest.raises(
            BadSetting, match="need only the uploads' sum|a part of the model's entries by itself|changes what it sends"
        ):
            made(name, compress="rbgs:5")
        return
    whole = path(made(name), 2)
    assert torch.allclose(path(made(name, compress="rbgs:1"), 2), whole, rtol=1e-11, atol=1e-13), "nothing is dropped"
    some = path(made(name, compress="topk:5"), 2)
    assert torch.allclose(some, whole, rtol=1e-4) == (name == "local")  # which sends nothing
    pooled = path(made(name, compress="topk:5", execution="pool"), 2)
    assert torch.allclose(some, pooled, rtol=1e-9, atol=1e-11)


FIELDS = {  # besides the defaults
    "scaffold": [dict(option=1)],
    "ft": [dict(keep_moments=True, optimizer="adam"), dict(begin=0), dict(begin=9)],
    "apfl": [dict(adaptive=True)],
    "gradma-w": [dict(prev_first="x0"), dict(prev="global")],
    "fedavg": [dict(keep_moments=True, optimizer="momentum")],
}
CROSSED = [(n, spec, name) for n, name in enumerate(SUMMED) for spec in range(len(SPECS))]


def crossing(name: str, fields: dict[str, Any], **settings: Any) -> Any:
    """A run of a few of the clients whose second phase, where there is one, begins in the third round."""
    kind = algorithm_class(name)
    begin = {"begin": 2} if "begin" in {f.name for f in dataclasses.fields(kind)} else {}
    return simulation(kind(**{"lr": 0.1, **begin, **fields}), cohort=1 if kind.pools else 3, steps=2, **settings)


@pytest.mark.parametrize(
    "name, spec",
    [
        pytest.param(name, SPECS[spec], marks=[] if spec == n % len(SPECS) or name == "ft" else [pytest.mark.system])
        for n, spec, name in CROSSED
    ],
)
def test_every_method_with_every_compressor_across_a_phase(name: str, spec: str, tmp_path: Path, count: Any) -> None:
    with counted(count, "a method with a compressor, across its phases, on disk and resumed", 1):
        check_across_a_phase(name, spec, tmp_path)


def check_across_a_phase(name: str, spec: str, tmp_path: Path) -> None:
    """Five rounds in memory and on disk, where a run is resumed after three, end with the same bits; fewer bytes go up."""
    for number, fields in enumerate([{}, *FIELDS.get(name, [])]):
        whole, plain_ = crossing(name, fields, compress=spec), crossing(name, fields)
        folder = tmp_path / str(number)
        (folder / CHECKPOINTS).mkdir(parents=True)
        parts = [crossing(name, fields, compress=spec, client_state="disk") for _ in range(2)]
        parts[0].place(folder, {}, 0)
        for t in range(5):
            if t == 3:
                kept = parts[0].tensors()
                parts[0].after_checkpoint()
                parts[0].close()
                parts[1].place(folder, kept, t)
                parts[1].restore({n: v.clone() for n, v in kept.items()}, t)
            ours, on_disk, full = whole.round(), parts[t >= 3].round(), plain_.round()
            assert ours.train_loss == on_disk.train_loss and ours.dropped == on_disk.dropped == 0
            assert ours.bytes_up < full.bytes_up or ours.bytes_up == full.bytes_up == 0
        assert torch.equal(whole.state.x, parts[1].state.x) and bool(whole.state.x.isfinite().all())
        _, _, memory = whole.serving()
        _, _, disk = parts[1].serving()
        assert all(torch.equal(*both) for both in zip(leaves(memory), leaves(disk), strict=True))
        if whole.alg.personalises:
            for one, other in zip(personal_models(whole), personal_models(parts[1]), strict=True):
                assert torch.equal(one.x, other.x) and torch.equal(one.buffers, other.buffers)
        parts[1].close()


def test_what_was_not_sent_waits_while_nothing_goes_up() -> None:
    run = simulation(algorithm_class("ft")(lr=0.1, begin=2), cohort=6, compress="topk:5")
    path(run, 2)
    _, _, before = run.serving()
    path(run, 2)
    _, _, after = run.serving()
    assert float(before.error.d.norm()) > 0 and torch.equal(before.error.d, after.error.d)
    assert not torch.equal(before.inner.v, after.inner.v), "clients are fine-tuned"


@dataclass(frozen=True)
class Changing(FedAvg):
    """Sends another vector besides from the third round on."""

    later: bool = False

    class Both(NamedTuple):
        d: Vec
        more: Vec

    def at(self, t: int) -> Changing:
        return replace(self, later=t >= 2)

    def local_end(self, down: Any, client: Any, work: Any) -> Any:
        up, client = super().local_end(down, client, work)
        return (self.Both(up.d, up.d) if self.later else up), client


def test_uploads_that_change_are_refused_before_the_first_round() -> None:
    assert simulation(Changing()).round().dropped == 0
    with pytest.raises(BadSetting, match="Changing changes what it sends in its second phase"):
        simulation(Changing(), compress="topk:5")


@pytest.mark.parametrize(
    "arguments",
    [
        ["ft", "--set", "begin=1", "--compress", "topk:4"],
        ["scaffold", "--set", "option=1", "--compress", "topk:4"],
        ["apfl", "--compress", "fp16", "--client-state", "disk"],
    ],
    ids=lambda given: given[0],
)
def test_a_run_ends_and_is_made_longer(arguments: list[str], tmp_path: Path) -> None:
    """A personal method leaves all its models, also from a table on disk."""
    small = ["--model", "logreg", "--clients", "4", "--cohort", "2", "--out", str(tmp_path / "run")]
    assert cli.main(["run", "--algorithm", *arguments, *small, "--rounds", "2"]) == 0
    assert (tmp_path / "run" / "super.safetensors").exists() == (arguments[0] != "scaffold")
    assert cli.main(["run", "--algorithm", *arguments, *small, "--rounds", "3", "--resume"]) == 0


def test_refused_are_those_that_look_at_single_uploads() -> None:
    refused = {name for name in names("algorithms") if looks_at_single_uploads(algorithm_class(name))}
    assert {"gradma", "gradma-s", "sparseloco"} <= refused and len(refused) < 10
    assert {*names("algorithms")} - {*SUMMED} - refused == {"streaming-diloco", "rolora"}


def test_every_vector_of_an_upload_arrives_in_the_end() -> None:
    """With SCAFFOLD's two vectors: what was sent and what is remembered add up to the uploads; c stays the clients' mean."""
    run = simulation(Scaffold(lr=0.1), cohort=6, compress="rbgs:5")
    for _ in range(8):
        run.round()
    _, _, state = run.serving()
    assert float(state.error.d.norm()) > 0 and float(state.error.dc.norm()) > 0
    # c = mean c_i in the method; here what has not arrived is missing from c: c + mean e = mean c_i.
    assert torch.allclose(run.state.companion.c + state.error.dc.mean(0), state.inner.c.mean(0), atol=1e-13)


def test_what_is_too_large_for_sixteen_bits_arrives_later() -> None:
    uplink = Uplink("fp16", 0, Net(nn.Linear(3, 1, bias=False)), Nothing())
    p, none = torch.tensor([1e5, -1.0, float("inf")]), torch.zeros(0)
    sent = uplink.unpack(uplink.pack(p, MODEL, none, none, 0), MODEL, none, none, 0)[:3]
    assert sent.tolist() == [65504.0, -1.0, float("inf")]
    assert (p - sent)[0] == 1e5 - 65504.0


def test_each_block_of_eight_bits_has_a_scale_of_its_own() -> None:
    """Small numbers in one block are not lost beside large ones in another; a block of zeros is zeros, NaN is not hidden."""
    uplink = Uplink("int8", 0, Net(nn.Linear(600, 1, bias=False)), Nothing())
    p = torch.cat([torch.linspace(-1e-3, 1e-3, 256), torch.zeros(256), torch.linspace(-50, 50, 88)])
    scales = uplink.scales(p, MODEL)
    sent = uplink.pack(p, MODEL, torch.zeros(0), scales, 0)
    assert (sent.dtype, sent.shape, scales.shape) == (torch.int8, (600,), (3,))
    back = uplink.unpack(sent, MODEL, torch.zeros(0), scales, 0)[:600]
    apart = (back - p).abs()
    assert 0 < apart[:256].max() <= 1e-3 / 254 * 1.001 and apart[512:].max() <= 50 / 254 * 1.001
    assert not back[256:512].any()
    p[3] = torch.nan
    assert uplink.scales(p, MODEL)[0].isnan()


def test_two_entries_of_four_bits_travel_in_a_byte() -> None:
    """An odd number of entries in blocks of 256: each is off by half of its block's scale at most."""
    uplink = Uplink("int4", 0, Net(nn.Linear(601, 1, bias=False)), Nothing())
    p = torch.cat([torch.linspace(-1e-3, 1e-3, 256), torch.zeros(256), torch.linspace(-50, 50, 89)])
    scales = uplink.scales(p, MODEL)
    sent = uplink.pack(p, MODEL, torch.zeros(0), scales, 0)
    assert (sent.dtype, sent.shape, scales.shape) == (torch.uint8, (301,), (3,))
    back = uplink.unpack(sent, MODEL, torch.zeros(0), scales, 0)[:601]
    apart = (back - p).abs()
    assert 0 < apart[:256].max() <= 1e-3 / 14 * 1.001 and 1 < apart[512:].max() <= 50 / 14 * 1.001
    assert not back[256:512].any() and back[-1] == scales[-1] * 7


def test_bytes_are_those_of_what_travels() -> None:
    b = 8  # ceil(39 / 5)
    for spec, each in (
        ("", 39 * 8),
        ("rbgs:5", b * 8),
        ("randk:5", b * 8),
        ("topk:5", b * (8 + 4)),
        ("fp16", 39 * 2),
        ("int8", 39 + 4),
        ("int4", 20 + 4),
    ):
        record = simulation(Scaffold(lr=0.1), cohort=3, compress=spec).round()
        assert record.bytes_up == 3 * 2 * each, spec
        assert record.bytes_down == 3 * 2 * 39 * 8


@pytest.mark.parametrize("spec", ["rbgs:5", "topk:5"])
def test_resumed_is_bit_for_bit(spec: str) -> None:
    whole = path(simulation(Scaffold(lr=0.1), compress=spec), 6)
    first = simulation(Scaffold(lr=0.1), compress=spec)
    path(first, 3)
    second = simulation(Scaffold(lr=0.1), compress=spec)
    second.restore({n: t.clone() for n, t in first.tensors().items()}, 3)
    assert torch.equal(path(second, 3), whole[3:])


def test_on_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "run",
        "--clients",
        "10",
        "--cohort",
        "3",
        "--rounds",
        "2",
        "--model",
        "logreg",
        "--out",
        str(tmp_path / "run"),
    ]
    assert cli.main([*small, "--compress", "rbgs:64"]) == 0
    assert 'compress = "rbgs:64"' in (tmp_path / "run" / "run.toml").read_text()
    assert cli.main([*small[:-1], str(tmp_path / "no"), "--compress", "rbgs:64", "--algorithm", "gradma-s"]) == 2
    assert "looks at each client's upload by itself" in capsys.readouterr().err


def test_mistakes_are_explained() -> None:
    with pytest.raises(UnknownName, match="did you mean 'rbgs'"):
        from_mapping({"compress": "rgbs:64"})
    for text in ("rbgs", "rbgs:0.5", "topk:many", "fp16:2", "int8:2", "int4:2"):
        with pytest.raises(BadSetting, match="compress takes rbgs:R"):
            from_mapping({"compress": text})


@dataclass(frozen=True)
class Untagged(FedAvg):
    """Sends its update in a field that is not said to be a vector of the model."""

    class Up(NamedTuple):
        d: Tensor

    def local_end(self, down: Any, client: Any, work: Any) -> Any:
        return self.Up(down.x - work.x), client


def test_a_vector_that_is_not_annotated_is_not_left_uncompressed_in_silence() -> None:
    assert simulation(Untagged()).round().dropped == 0
    with pytest.raises(BadSetting, match="not annotated `Vec`"):
        simulation(Untagged(), compress="topk:5").round()

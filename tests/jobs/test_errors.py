"""Bad input is refused in one clear line, and nothing is written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import undrift
from tests.small import QUICK, data, tiny_mlp
from undrift import cli
from undrift.core.errors import BadData, BadSetting, MissingData, UndriftError, UnknownName

BAD_COMMANDS = [
    ("run --algorithm gradma-ss", "did you mean 'gradma-s'"),
    ("run --algoritm fedavg", "did you mean '--algorithm'"),
    ("run --dataset digit", "did you mean 'digits'"),
    ("run --model lenet", "did you mean 'lenet5'"),
    ("run --partition dirichlett:1", "did you mean 'dirichlet'"),
    ("run --algorithm fedprox --set nu=1", "did you mean 'mu'"),
    ("run --set lr", "FIELD=VALUE"),
    ("run --clients 5 --cohort 6", "cannot be drawn from 5 clients"),
    ("run --algorithm gradma-s --set slots=5", "slots must be 0 or at least"),
    ("run --clients 5000", "5000"),
    ("run --set lr=nan", "lr must be"),
    ("run --set lr=-1", "lr must be"),
    ("run --set lr=fast", "lr must be float"),
    ("run --algorithm fedavgm --set beta1=1.5", "beta1 must lie in"),
    ("run --val-fraction nan", "val_fraction must"),
    ("run --val-fraction 1.0", "val_fraction must"),
    ("run --partition dirichlet:-1", "dirichlet"),
    ("run --partition dirichlet:nan", "dirichlet"),
    ("run --steps 5 --epochs 1", "not both"),
    ("run --rounds -3", "rounds must be at least 1"),
    ("run --rounds 0", "rounds must be at least 1"),
    ("dp --workers 0", "workers must be at least 1"),
    ("sweep one.toml --out s", "has no [sweep] table, so it is one run"),
    ("run --stop-at accuracy=high", "stop_at"),
    ("run --weights sized", "did you mean 'size'"),
    ("run --set optimizer=nesterow", "did you mean 'nesterov'"),
    ("run --device tpu", "tpu"),
    ("run --rounds many", "invalid int value"),
    ("run --algorithm nowhere.at:All", "cannot import"),
    ("run --algorithm undrift.algorithms.fedavg:FedAvrg", "did you mean 'FedAvg'"),
    ("run --model lenet5", "lenet"),
    ("run --resume", "no run"),
    ("run missing.toml", "cannot read"),
    ("run broken.toml", "not valid TOML"),
    ("run unknown.toml", "did you mean 'rounds'"),
    ("sweep broken.toml --out s", "not valid TOML"),
    ("sweep swept.toml --out s", "did you mean 'seeds'"),
    ("report nowhere --out r.html", "nowhere"),
    ("list algorithm", "did you mean 'algorithms'"),
    ("cite fedavgg", "did you mean 'fedavg'"),
    ("data shows", "did you mean 'show'"),
    ("run --device gpu", "did you mean 'cuda'"),
    ("run --partition noniid", "did you mean 'dirichlet'"),
    ("run --dtype float16", "half precision is not offered"),
    ("run --learning-rate 0.1", "did you mean '--lr'"),
    ("run --lr 0.1 --set lr=0.2", "are the same setting"),
    ("run --mu 0.1", "give --set mu=VALUE"),
    ("run --algo fedavg", "did you mean '--algorithm'"),
    ("run --gpu", "'undrift run' has no --gpu; give --device cuda"),
    ("run --verbose", "'undrift run' has no --verbose; try 'undrift run --help'"),
    ("run --workers 4", "is an argument of 'undrift dataparallel'"),
    ("dp --partition iid", "is an argument of 'undrift run'"),
    ("run algorithm=fedavg", "write --algorithm fedavg, not algorithm=fedavg"),
    ("run algorithm=fedavg rounds=5", "write --rounds 5, not rounds=5"),
    ("run mu=0.1", "write --set mu=0.1"),
    ("run --set mu=0.1", "fedavg has no field 'mu'; these have it: fedasync, fedprox, fedproxm, moon, moonm"),
    ("run --set rounds=3", "a setting of the run: give --rounds"),
    ("run --algorithm quantum", "none of the 63 names is close to it; 'undrift list algorithms' shows them"),
    ("run --algorithm fedavg,fedprox", "several are a sweep"),
    ("run --stop-at loss=0.1", "would end the run while loss is still large; write loss<0.1"),
    ("run --set lr=0.1 --set lr=0.2", "lr is given twice"),
    ("run --fp16", "did you mean '--precision'"),
    ("run --target-accuracy 0.9", "did you mean '--stop-at'"),
    ("run --noise-multiplier 1", "did you mean '--privacy-noise'"),
    ("dp --world-size 4", "did you mean '--workers'"),
    ("deploy client", "did you mean 'node'"),
    ("dashboard", "did you mean 'watch'"),
    ("run --algorithm def", "write 'undrift dataparallel --method def'"),
    ("run --algorithm gpipe", "write 'undrift pipe --method gpipe'"),
    ("run --algorithm krum", "give --aggregate krum"),
    ("run --algorithm fedopt", "did you mean 'fedadam'"),
    ("run --strategy fedavg", "did you mean '--algorithm'"),
    ("run --method fedavg", "did you mean '--algorithm'"),
    ("dp --algorithm ef", "did you mean '--method'"),
    ("pipe --algorithm dsp", "did you mean '--method'"),
    ("run --accelerator gpu", "did you mean '--device'"),
    ("run --model resnet34", "known: bag-of-words"),
    ("run --dataset emnist", "known: brca"),
    ("run --dataset hf:mnist", "data sets have short names here; did you mean 'mnist'?"),
    ("run --dataset uoft-cs/cifar10", "did you mean 'cifar10'?"),
    ("run --dataset me/mine", "'undrift list datasets' shows them"),
    ("run --dataset ./pictures", "--dataset imagefolder:./pictures"),
    ("run --partition pathological:2", "did you mean 'shards'"),
    ("run --alpha 0.1", "give --set alpha=VALUE; for Dirichlet's alpha write the partition dirichlet:VALUE"),
    ("run trainer.max_epochs=10", "write --rounds 10, not trainer.max_epochs=10"),
    ("run model.hidden=10", "none is called hidden"),
    ("fit", "did you mean 'run'"),
    ("frobnicate", "unknown command 'frobnicate'; known: cite, data"),
    ("train", "did you mean 'run'"),
    ("help", "write 'undrift --help'"),
    ("run --participation 0.1", "did you mean '--cohort'"),
    ("run --fraction 0.1", "did you mean '--cohort'"),
    ("run --bs 32", "did you mean '--batch'"),
    ("run --data mnist", "did you mean '--dataset'"),
    ("run --output x", "did you mean '--out'"),
    ("run --seeds 0,1,2", "did you mean '--seed'? --seeds is an argument of 'undrift reproduce'"),
    ("run --gpus 1", "give --device cuda"),
    ("run --no-cuda", "give --device cpu"),
    ("run --wandb", "give --track wandb"),
    ("run --config c.toml", "give the file alone: 'undrift run FILE.toml'"),
    ("run --dataset mine.npz", "'undrift data add NAME FILE.npz' gives it one"),
    ("run --model cnn", "did you mean 'small-cnn'"),
    ("run --partition dir:0.1", "did you mean 'dirichlet'"),
    ("run --set momentum 0.9", "--set takes FIELD=VALUE, not 'momentum'"),
    ("run --set lr=0.1,mu=0.2", "give --set once for each field"),
    ("run --stop-at accuracy=95", "accuracy lies between 0 and 1"),
    ("run fedavg", "write --algorithm fedavg"),
    ("run --resume nowhere", "give its folder: --out DIR --resume"),
    ("run swept.toml", "start them with 'undrift sweep FILE.toml'"),
    ("run rate.toml", "did you mean 'lr'"),
    ("run +algorithm=fedavg", "write --algorithm fedavg, not +algorithm=fedavg"),
    ("run algorithm.mu=0.1", "write --set mu=0.1"),
    ("sweep demo --rounds 3", "its settings stand in the file"),
    ("tune demo --keep 1", "keep must be at least 2, not 1"),
    ("tune demo --rungs 2", "rungs are rising shares of the rounds"),
    ("pipe --stages 3", "did you mean '--blocks'"),
    ("data add mine nowhere.npz", "there is no file nowhere.npz"),
    ("data add mine one.toml", "is no .npz file; write one with numpy.savez('one.npz'"),
    ("run five.toml", "set must be a table"),
    ("dp five.toml", "set must be a table"),
    ("pipe five.toml", "set must be a table"),
    ("sweep five.toml --out s", "set must be a table"),
    ("deploy init d --config five.toml", "set must be a table"),
    ("deploy init d --config table.toml", "clients must be int"),
    ("deploy local d --config place.toml", "out must be str"),
    ("sweep table.toml --out s", "dataset must be str"),
    ("run nul.toml", "dataset must be text without control characters"),
    ("run deep.toml", "not valid TOML"),
    ("run --epochs 1e18", "use fewer steps or epochs"),
    ("run --epochs 1e300", "epochs must be a number of at least 0 and below 1e+30"),
    ("run --steps 1000000000000000000", "steps must be at most"),
    ("run --steps 2000000000", "use fewer steps or epochs"),
    ("run --lr-decay 1e300", "lr_decay must be a number above 0 and below 1e+30"),
    ("dp --weight-decay 1e308", "weight_decay must be a number of at least 0 and below 1e+30"),
    ("pipe --lr 1e39", "lr must be a number of at least 0 and below 1e+30"),
    ("reproduce gradma-table1 --seeds 9223372036854775808", "seeds must be at least 1 and at most 10000"),
    ("run --lr-decay 10", "too large within 100 rounds"),
    ("run --lr-drops 1,2 --lr-drop 1e29", "too large within 100 rounds"),
    ("run --set lr=" + "[" * 3000, "lr must be float"),
    ("pipe --schedule 1000000000000", "print fewer batches"),
    ("pipe --queues 1,0;999999999999,0 --schedule 3", "queues of at most 100000"),
    ("pipe --blocks 1000000 --schedule 3", "blocks must be at most 1000"),
    ("data show --seed -1", "seed must be at least 0"),
]


@pytest.mark.parametrize(("command", "says"), BAD_COMMANDS)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    command: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDRIFT_DATA", raising=False)
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    (tmp_path / "unknown.toml").write_text("round = 3")
    (tmp_path / "swept.toml").write_text("[sweep]\nseds = [1]")
    (tmp_path / "one.toml").write_text("rounds = 3")
    (tmp_path / "rate.toml").write_text("learning_rate = 0.1")
    (tmp_path / "five.toml").write_text("set = 5\n[sweep]")
    (tmp_path / "table.toml").write_text('dataset = {}\nclients = {}\n[sweep]\nelse_dataset = "digits"')
    (tmp_path / "place.toml").write_text("out = {}")
    (tmp_path / "nul.toml").write_text('dataset = "imagefolder:a\\u0000b"')
    (tmp_path / "deep.toml").write_text("lr = " + "[" * 5000)
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(command.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith("undrift: ") and said.err.count("\n") == 1, said.err
    assert says in said.err and "this goes to" not in said.out
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize("text", ["a\0b", "a\nb", "\x1b[31m", "caf\udce9"])
@pytest.mark.parametrize(
    "command",
    ["run FILE", "run --out FILE", "report FILE --out r.html", "data prepare digits --out FILE", "deploy init FILE"],
)
def test_control_characters_in_a_path_are_refused(
    command: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([text if word == "FILE" else word for word in command.split()]) == 2
    said = capsys.readouterr().err
    assert "without control characters" in said and said.count("\n") == 1 and said[:-1].isprintable()
    assert not list(tmp_path.iterdir())


def test_a_message_with_lines_of_another_library_is_one_line() -> None:
    assert cli.message_of(BadData("cannot read a\nb: \x1b[31m")) == "cannot read a b: \\x1b[31m"
    assert cli.message_of(FileNotFoundError("no\nfile")) == "FileNotFoundError: no file"


def test_nan_in_a_clients_data_is_said_at_the_start_with_its_name() -> None:
    bad = data((30, 30, 30), features=5)
    bad.x_train[31, 2] = np.nan
    named = dataclasses.replace(bad, site_names=("Bonn", "Köln", "Trier"))
    with pytest.warns(UserWarning, match=r"client 1 \(Köln\) has NaN or infinity in 1 of its training samples"):
        undrift.run(model=tiny_mlp(), data=named, rounds=1)
    with pytest.warns(UserWarning, match="client 1 has NaN"):
        undrift.run(model=tiny_mlp(), data=bad, rounds=1)
    spoilt = dataclasses.replace(data((30, 30)), x_test=np.full((60, 5), np.inf, np.float32))
    with pytest.warns(UserWarning, match="60 test samples have NaN or infinity|the loss on the test set is nan"):
        undrift.run(model=tiny_mlp(), data=spoilt, rounds=1)


def test_a_missing_data_set_names_three_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNDRIFT_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MissingData, match=r"UNDRIFT_DATA.*"):
        undrift.run(dataset="cifar10", rounds=1)


def test_bad_data_from_python() -> None:
    with pytest.raises(BadData, match="3 inputs but 2 targets"):
        undrift.run(model=tiny_mlp(), data=(np.zeros((3, 5)), [0, 1], np.zeros((1, 5)), [0]))
    with pytest.raises(BadData, match="lacks y_test"):
        undrift.run(model=tiny_mlp(), data={"x_train": 0, "y_train": 0, "x_test": 0})
    with pytest.raises(UnknownName, match="did you mean 'rounds'"):
        undrift.run(round=3)
    with pytest.raises(BadSetting, match="carries its own fields"):
        undrift.run(algorithm=undrift_fedavg(), set={"lr": 1.0})
    assert issubclass(BadSetting, UndriftError)


def test_what_is_not_accepted_in_python_is_one_clear_line() -> None:
    few = {"clients": 2, "cohort": 1, "rounds": 1, "partition": "iid"}
    with pytest.raises(BadData, match="'undrift data add NAME FILE.npz'"):
        undrift.run(few, model=tiny_mlp(), data="mine.npz")
    with pytest.raises(BadSetting, match="mu is a field of methods, not a setting of the run; put it into set"):
        undrift.run(few, mu=0.1)
    with pytest.raises(BadSetting, match="for Dirichlet's alpha write the partition dirichlet:VALUE"):
        undrift.run(few, alpha=0.1)
    with pytest.raises(UnknownName, match="'undrift run --help' shows them"):
        undrift.run(few, callbacks=[])
    wrong: dict[str, Any] = {"algorithm": len, "on_round": 5, "out": 5, "progress": "yes", "loss": "mse"}
    for name, value in wrong.items():
        with pytest.raises(BadSetting, match=f"{name} must be"):
            undrift.run(few, **{name: value})
    for name, value in {"algorithm": dict, "loss": nn.MSELoss}.items():
        with pytest.raises(BadSetting, match=f"{name} must be"):
            undrift.run(few, **{name: value})


def test_whose_function_failed_is_said() -> None:
    few: dict[str, Any] = {"clients": 2, "cohort": 1, "rounds": 1, "partition": "iid"}

    def failing(outputs: Any, targets: Any) -> Any:
        raise ValueError("cannot handle this mix")

    with pytest.raises(
        BadSetting, match=r"metric 'f1' failed on outputs \[.*, 10\] and targets .*: ValueError: cannot handle"
    ):
        undrift.run(few, metrics={"f1": failing})
    with pytest.raises(BadSetting, match=r"the loss failed on outputs .*: ValueError: Target size"):
        undrift.run(few, loss=nn.BCEWithLogitsLoss())
    with pytest.raises(BadSetting, match=r"called with \(shape, classes\) = \(\(1, 8, 8\), 10\), failed: TypeError"):
        undrift.run(few, model=lambda: tiny_mlp())
    with pytest.raises(BadSetting, match="metrics takes a list of names"):
        undrift.run(few, metrics="f1")
    x, y = torch.rand(20, 1, 8, 8), torch.arange(20) % 2
    with pytest.raises(BadSetting, match=r"whole numbers \[n\], and the targets are int64 \[20, 1\]"):
        undrift.run(few | {"partition": "dirichlet:1"}, model=tiny_mlp(), data=(x, y[:, None], x, y[:, None]))
    with pytest.raises(BadData, match=r"are a tuple, data=\(train, test\)"):
        undrift.run(few, model=tiny_mlp(), data={"train": (x, y), "test": (x, y)})


def undrift_fedavg() -> Any:
    from undrift.algorithms.fedavg import FedAvg

    return FedAvg()


def test_losses_and_metrics_that_would_be_misread_are_refused() -> None:
    own, settings = data((30, 30)), {"partition": "sites", "clients": 2, "cohort": 2, "rounds": 2}
    with pytest.raises(BadSetting, match="reduction='none'"):
        undrift.run(settings, model=tiny_mlp(), data=own, loss=nn.CrossEntropyLoss(weight=torch.ones(3)))
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([9.0, 1.0, 1.0]), reduction="none")
    plain = undrift.run(settings, model=tiny_mlp(), data=own, loss=nn.CrossEntropyLoss())
    heavy = undrift.run(settings, model=tiny_mlp(), data=own, loss=weighted)
    assert plain.accuracy is not None and not torch.equal(plain.model["lora_A.weight"], heavy.model["lora_A.weight"])
    with pytest.raises(BadSetting, match="cannot be called 'loss'"):
        undrift.run(settings, model=tiny_mlp(), data=own, metrics={"loss": lambda o, t: o.mean()})
    with pytest.raises(BadSetting, match="class labels"):
        undrift.run(
            model=nn.Linear(2, 1), data=(np.ones((9, 2)), np.ones(9), np.ones((1, 2)), np.ones(1)), clients=3, cohort=1
        )


def test_settings_that_mean_nothing_are_refused() -> None:
    for setting in ({"steps": 0}, {"epochs": 0.0}, {"stop_at": "accuracy=90"}, {"set": 3}, {"set": {"lr": 1e39}}):
        with pytest.raises(UndriftError):
            undrift.run(setting, rounds=1)
    assert (
        undrift.run(
            {"steps": 5, **{k: v for k, v in QUICK.items() if k != "steps"}}, rounds=1, epochs=1.0
        ).config.epochs
        == 1.0
    )


def test_lr_is_accepted_everywhere(tmp_path: Path) -> None:
    (tmp_path / "lr.toml").write_text("lr = 0.25\n[set]\nmu = 0.5")
    by_name = undrift.run(QUICK, lr=0.25, rounds=1)
    assert by_name.config.set["lr"] == undrift.run(QUICK | {"lr": 0.25}, rounds=1).config.set["lr"] == 0.25
    kept = undrift.run(tmp_path / "lr.toml", algorithm="fedprox", rounds=1, **QUICK).config.set
    assert (kept["lr"], kept["mu"]) == (0.25, 0.5)
    also = undrift.run(tmp_path / "lr.toml", algorithm="fedprox", rounds=1, **QUICK | {"lr": 0.5}).config.set
    assert (also["lr"], also["mu"]) == (0.5, 0.5)
    words = "run --rounds 1 --clients 12 --cohort 4 --model logreg --algorithm fedprox --set mu=0.5 --lr 0.125"
    assert cli.main([*words.split(), "--out", str(tmp_path / "run")]) == 0
    assert undrift.run(out=tmp_path / "run", resume=True, rounds=2).config.set["lr"] == 0.125
    with pytest.raises(BadSetting, match="same setting"):
        undrift.run(lr=0.1, set={"lr": 0.2})


def test_sites_set_the_number_of_clients() -> None:
    result = undrift.run(
        dataset="synthetic-sites(size=16)",
        partition="sites",
        model="unet(width=2, depth=1)",
        rounds=1,
        steps=1,
        batch=2,
    )
    assert (result.config.clients, result.config.cohort) == (6, 6)

"""`lightning-bnn compare`: rows, errors, resuming, traces, and what it refuses."""

import contextlib
import io
import json
import re
from pathlib import Path

import lightning as L
import pytest
import torch
from runs import QUIET
from small_runs import NET, bank, config, numbers, results
from torch import nn

from lightning_bnn.bank import CheckpointBank, chains_of
from lightning_bnn.cli import main
from lightning_bnn.datamodules import Digits
from lightning_bnn.evaluation import comparison, draw
from lightning_bnn.evaluation.problem import StoredBatches, read_problem
from lightning_bnn.evaluation.protocols import PROTOCOLS
from lightning_bnn.evaluation.reference_networks import Reference
from lightning_bnn.evaluation.stored_posteriors import Location, posterior_of, read_posterior
from lightning_bnn.metrics import law_mmd, mixture_mmd, mmd, mmd_table
from lightning_bnn.models import mlp
from lightning_bnn.modules import MFVI, SWAG, Laplace, MCDropout
from weightsym import canonicalise, discover
from weightsym import params as P

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("undrawn")]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config(tmp_path)
    return tmp_path


def compare(**more):
    args = ["compare", more.pop("reference"), "--data", "like.yaml", "--out", "out"]
    for name, value in more.items():
        args += [f"--{name.replace('__', '.')}", str(value)]
    main(args)
    of_predictions = "table1" if more.get("protocol") == "p1" else "predictions"
    return numbers("out", "distances"), numbers("out", of_predictions)


def row(rows, mode, method):
    (found,) = (r for r in rows if (r.get("mode", mode), r["method"]) == (mode, method))
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory, undrawn):
    """Compare posteriors of every kind with one reference, by either protocol.

    By protocol: the folder, all stacks, and what was printed.
    """
    found = {}
    steps = {"member": [k % 3 for k in range(12)], "step": [k // 3 for k in range(12)]}
    for protocol, samples in (("full", 100), ("p1", 6)):
        folder, out = tmp_path_factory.mktemp(protocol), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            patch.chdir(folder)
            config(folder)
            (folder / "empty").mkdir()
            stacks = {
                "ref": bank("ref", 12, seed=1),
                "E": bank("ens", 5, seed=2),
                "R": bank("run", 6, seed=3, step=list(range(6))),
                "C": bank("chains", 12, seed=4, **steps),
                "O|1": bank("one", 1, seed=5),
                "copy": bank("copy", 12, seed=1),
                "many": bank("many", 30, seed=6),
            }
            places = {"E": "ens", "R": "run", "C": "chains", "O|1": "one", "copy": "copy"}
            places |= {"many": "many", "part": "ens[1:4]", "bad": "empty"}
            posteriors = [w for name, at in places.items() for w in (f"--posteriors.{name}", at)]
            args = ["ref", "--protocol", protocol, "--samples", str(samples)]
            main(["compare", "--data", "like.yaml", "--out", "out", *args, *posteriors])
        found[protocol] = folder / "out", stacks, out.getvalue()
    return found


def test_numbers_of_an_ensemble_are_those_computed_by_hand(compared):
    folder, stacks, _ = compared["full"]
    reference, ensemble = stacks["ref"], stacks["E"]
    found = row(numbers(folder, "distances"), "", "E")
    mixture, floor = mixture_mmd(reference, ensemble, None)
    sym = discover(NET, torch.randn(2, 1, 8, 8))
    freed = [canonicalise(stack, sym) for stack in (reference, ensemble)]
    for name, value in {
        "law": mmd(reference, ensemble),
        "mixture": mixture.value,
        "floor": floor.value,
        "NS law": mmd_table(*freed).reduce("median"),
    }.items():
        assert found[name] == pytest.approx(100 * float(value)), name
    data = Digits()
    x, y = data.load().test
    probs = P.apply(NET, ensemble, data.normalise(x)).double().softmax(-1)
    whole = 100 * float((probs.mean(0).argmax(-1) == y).double().mean())
    single = 100 * (probs.argmax(-1) == y).double().mean(1)
    cells = {tuple(r[:2]): r[2] for r in results(folder)["tables"]["predictions"]["rows"]}
    assert cells["Multi mode", "E"]["value"] == pytest.approx(whole)
    wanted = {"value": float(single.mean()), "error": float(single.std())}
    assert cells["One mode", "E"] == pytest.approx(wanted)


def test_p1_pools_all_networks_beside_the_law(compared):
    folder, stacks, _ = compared["p1"]
    found = row(numbers(folder, "table1"), "Multi mode", "E")
    assert found["MMD²"] == pytest.approx(100 * float(mmd(stacks["ref"], stacks["E"])))
    law = law_mmd(stacks["ref"], stacks["C"], [k % 3 for k in range(12)])
    found = row(numbers(folder, "distances"), "", "C")
    assert found["law"] == pytest.approx(100 * float(law.value))
    assert "mmd" not in str(results(folder)["tables"]["distances"]["header"]).lower()
    assert "table1" not in results(compared["full"][0])["tables"]


def test_modes_are_members_runs_or_networks_and_not_more_than_samples(compared):
    """By posterior: mode, number of modes, networks, and those that are pooled."""
    folder, _, _ = compared["p1"]
    expected = {
        "C": [("one", 3, 4, 4), ("multi", 3, 12, 6)],
        "many": [("one", 6, 1, 1), ("multi", 6, 6, 6)],
        "part": [("one", 3, 1, 1), ("multi", 3, 3, 3)],
        "R": [("one", 1, 6, 6)],
        "O|1": [("one", 1, 1, 1)],
    }
    for name, rows in expected.items():
        held = json.loads((folder / "rows" / f"{name}.json").read_text())["rows"]
        assert [(r["mode"], r["seeds"], r["networks"], r["pooled"]) for r in held] == rows


def test_one_mode_has_no_law_and_errors_by_a_bootstrap(compared):
    folder, _, _ = compared["full"]
    distances, predictions = numbers(folder, "distances"), numbers(folder, "predictions")
    assert not [r for r in predictions if r["mode"] == "Multi mode" and r["method"] in ("R", "O|1")]
    held = results(folder)["tables"]["predictions"]["rows"]
    assert next(r for r in held if r[1] == "R")[2]["error"] > 0
    for name in ("R", "O|1"):
        assert row(distances, "", name)["law"] is None
        assert row(predictions, "One mode", name)["Acc"] > 0
    assert row(distances, "", "R")["one mode"] is not None


def test_posteriors_that_fail_do_not_stop_the_others(compared):
    folder, _, out = compared["full"]
    distances = numbers(folder, "distances")
    assert "12 networks of copy are also in the reference" in out
    assert "bad failed:" in out
    for name in ("bad", "copy"):
        assert row(distances, "", name)["law"] is None
        assert re.search(rf"\b{name} +/ +/", out)


def test_every_number_can_be_traced(compared):
    folder, _, out = compared["p1"]
    found = results(folder)["settings"]
    assert (found["reference"], found["protocol"], found["samples"]) == ("ref", "p1", 6)
    origin = found["posteriors"]["part"]
    assert (origin["rows"], origin["path"]) == ("1:4", "ens")  # as it was given
    assert len(origin["sha256"]) == len(found["config_sha256"]) == 12
    written = (p for p in folder.rglob("*") if p.suffix in (".md", ".csv", ".json"))
    assert not any(str(folder.parent) in path.read_text() for path in written)
    assert "Reference: 12 networks of ref" in out
    assert "Out of distribution: scrambled" in out
    (kind,) = ((r["kind"], r["modes"]) for r in numbers(folder, "compared") if r["method"] == "E")
    assert kind == ("networks", "5")


def test_chains_are_one_law_and_those_that_do_not_agree_are_said_to(here, capsys):
    """Around one network each, or around the same one: only then have they converged."""
    g = torch.Generator().manual_seed(0)
    centres, networks = P.populate(NET, 4, g), bank("n", 4, seed=2)
    members = [k % 4 for k in range(120)]
    stacks = {}
    for name, spread in (("apart", 1.0), ("same", 0.0)):
        stack = {n: (t[:1] + spread * (t - t[:1]))[members] for n, t in centres.items()}
        stacks[name] = {n: t + 0.05 * torch.randn(t.shape, generator=g) for n, t in stack.items()}
        with CheckpointBank(name) as held:
            held.extend(stacks[name], [{"member": m} for m in members])
    compare(reference="apart", posteriors__N="n")
    assert "NOT CONVERGED" in capsys.readouterr().out
    distances, _ = compare(reference="same", posteriors__N="n", reference_is="sampled")
    law = law_mmd(stacks["same"], networks, None, chains=members)  # no pairs within a chain
    assert row(distances, "", "N")["law"] == pytest.approx(100 * float(law.value))
    out = capsys.readouterr().out
    assert "120 networks of 4 chains, sampled: draws of the posterior" in out
    assert "R-hat of its predictions: median 1.0" in out
    assert "NOT CONVERGED" not in out
    assert "Noise of" not in out


def test_rows_are_computed_once(here, monkeypatch):
    bank("ref", 6, seed=1)
    bank("a", 3, seed=2)
    bank("b", 3, seed=3)
    first, calls, kept = compare(reference="ref", posteriors__A="a"), [], comparison.rows_of
    monkeypatch.setattr(comparison, "rows_of", lambda *a: calls.append(a[0].name) or kept(*a))
    path = here / "out" / "rows" / "A.json"
    for content in (path.read_text(), path.read_text()[:100]):  # not written to its end
        path.write_text(content)
        assert compare(reference="ref", posteriors__A="a") == first
    assert calls == ["A"]
    for damage in ("rows", "seeds"):
        path.write_text(path.read_text().replace(f'"{damage}"', '"x"'))
        assert compare(reference="ref", posteriors__A="a") == first
    assert calls == ["A"] * 3
    calls[:] = ["A"]
    compare(reference="ref", posteriors__A="a", posteriors__B="b")
    compare(reference="ref", posteriors__A="a", seed=1)
    with CheckpointBank("a") as held:
        held.extend(P.populate(NET, 1, torch.Generator().manual_seed(9)))
    compare(reference="ref", posteriors__A="a", seed=1)
    assert calls == ["A", "B", "A", "A"]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (mlp(64, [5], 10), "`1.weight`, of shape .4, 64. in the reference, has shape .5, 64."),
        (nn.Sequential(*NET[:-1], nn.Linear(4, 10, bias=False)), "`3.bias`.* is missing"),
    ],
)
def test_networks_of_another_kind_are_refused(other, sentence):
    beside = Reference(P.populate(NET, 5), NET, [torch.randn(2, 64)], PROTOCOLS["full"], 4)
    with pytest.raises(
        ValueError, match=f"E has different networks from the reference: {sentence}"
    ):
        beside.check(P.populate(other, 4), "E")


def test_a_fresh_run_is_read_with_its_own_configuration(here):
    bank("ref/bank", 4, seed=1)
    (here / "ref" / "config.yaml").write_text((here / "like.yaml").read_text())
    options = {"model.init_args.members": 4, "trainer.max_epochs": 1, "trainer.accelerator": "cpu",
               "trainer.default_root_dir": "run", "trainer.limit_train_batches": 1}  # fmt: skip
    main(["fit", "-c", "like.yaml", *(f"--{name}={value}" for name, value in options.items())])
    main(["compare", "ref/bank", "--posteriors.E", "run", "--out", "out"])
    assert results("out")["settings"]["posteriors"]["E"]["kind"] == "DeepEnsemble"
    assert results("out")["settings"]["config"].startswith("ref")
    assert row(numbers("out", "predictions"), "Multi mode", "E")["Acc"] > 0


def test_a_loader_that_shuffles_is_read_once():
    rows = torch.utils.data.TensorDataset(torch.arange(99.0), torch.arange(99))
    loader = torch.utils.data.DataLoader(rows, 10, shuffle=True)
    batches = StoredBatches(Digits(), loader)
    first, again = (torch.cat([x for x, _ in batches]) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first.long(), batches.targets())
    assert not torch.equal(first, torch.cat([x for x, _ in loader]))  # the control


@pytest.mark.frames
@pytest.mark.parametrize("kind", [SWAG, MCDropout, Laplace, MFVI])
def test_checkpoints_of_modules_that_python_made_are_what_they_are(here, kind):
    options = {"start": 0} if kind is SWAG else {"p": 0.2} if kind is MCDropout else {}
    options |= {"structure": "diag", "prior_std": 1.0} if kind is Laplace else {}
    module, data = kind(mlp(64, [4], 10), members=2, **options), Digits()
    few = {"max_epochs": 3, "limit_train_batches": 2, "enable_checkpointing": True}
    L.Trainer(**{**QUIET, **few}, default_root_dir=here).fit(module, data)
    (path,) = here.rglob("*.ckpt")
    problem = read_problem(here / "like.yaml")
    found = read_posterior("M", Location.of(str(path)), problem)
    assert found.origin["kind"] == kind.__name__
    assert [type(m) for m in found.modes] == [type(m) for m in module.posterior().modes()]
    one, two = (
        draw(modes[0], 3, 0)["1.weight"] for modes in (found.modes, module.posterior().modes())
    )
    torch.testing.assert_close(one, two)


def test_networks_of_a_gaussian_have_statistics_of_their_own():
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 10)
    )
    module, data = SWAG(net, members=2, start=0, eval_samples=3), Digits()
    L.Trainer(**QUIET, max_epochs=3).fit(module, data)
    module.use_training_data(data)
    one, two = posterior_of("S", module, samples=12).predictors
    assert one.size == two.size == 12
    noise = [m.networks["1.weight"] - m.networks["1.weight"].mean(0) for m in (one, two)]
    assert abs(torch.corrcoef(torch.stack([t.flatten() for t in noise]))[0, 1]) < 0.3
    statistics = one.networks["2.running_var"]
    assert len(statistics.unique(dim=0)) == 12


def test_the_noise_floor_is_that_of_as_many_networks():
    """Against fresh samples of the same law, and of parts as if they were alone."""
    g = torch.Generator().manual_seed(0)
    reference, fresh = P.populate(NET, 60, g), P.populate(NET, 50 * 30, g)
    beside = Reference(reference, NET, [torch.randn(2, 64)], PROTOCOLS["full"], 50)
    floors = beside.noise_floor(50, repeats=100)
    found = beside.pooled(fresh, torch.arange(50 * 30).split(50))
    values = {name: torch.tensor([one[name] for one in found]) for name in ("mmd", "mmd_max")}
    assert floors["mmd"].error == pytest.approx(float(values["mmd"].std()), rel=0.3)
    # the largest of twenty numbers is not around zero, and the floor says where it is
    assert values["mmd_max"].mean() > 5 * values["mmd_max"].std() / 30**0.5
    assert abs(floors["mmd_max"].value - values["mmd_max"].mean()) < floors["mmd_max"].error / 2
    alone = {n: t[50:100] for n, t in fresh.items()}
    for name, reduction in (("mmd", "median"), ("mmd_max", "max")):
        wanted = float(mmd(reference, alone, reduction))
        assert found[1][name] == pytest.approx(wanted, abs=1e-7)


def test_a_place_must_be_one_thing(here):
    bank("logs/version_0/bank", 4, seed=2)
    assert Location.of("logs").file() == Location.of("logs/version_0/bank").path
    bank("logs/version_1/bank", 4, seed=2)
    for name in ("one", "two"):
        version = here / "runs" / name / "lightning_logs" / "version_0"
        for file in ("config.yaml", "checkpoints/last.ckpt"):
            (version / file).parent.mkdir(parents=True, exist_ok=True)
            (version / file).write_text("")
    assert Location.of("runs/one").file().name == "last.ckpt"
    (version / "copy" / "deep").mkdir(parents=True)
    (version / "copy" / "deep" / "config.yaml").write_text("")
    assert Location.of(str(version)).file() == version / "checkpoints" / "last.ckpt"
    (here / "runs" / "two" / "other.ckpt").write_text("")
    for place in ("logs", "runs", "runs/two"):
        with pytest.raises(ValueError, match="holds several posteriors, name one of them"):
            Location.of(place).file()


def test_which_networks_belong_together():
    rows = {"a/b[:3]": slice(None, 3), "a/b[-3:]": slice(-3, None), "a/b": None}
    assert all(Location.of(text).rows == some for text, some in rows.items())
    assert Location.of("a/b[-:]") == Location(Path("a/b[-:]"))
    files = [{"file": f"{run}/{step}.ckpt", "step": step} for run in "ab" for step in (1, 2)]
    early = [{"file": f"{run}/last.ckpt", "step": k} for k, run in enumerate("abc")]
    for records, chains in (
        ([{"member": 0}, {"member": 1}, {"member": 0}], [0, 1, 0]),
        ([{"step": 1}, {"step": 2}], [0, 0]),
        ([{}, {}], None),
        ([{"step": 4}], None),
        (files, [0, 0, 1, 1]),
        (early, None),
    ):
        assert chains_of(records) == chains


A = "--posteriors.A a"
LIKE = "--data like.yaml"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (f"{A} {LIKE}", "`reference` is missing"),
        (f"--reference ref {LIKE}",
         "`reference` is not an option: write it without `--reference`, after the command"),
        (f"ref a {LIKE}", "'a' has no option before it, and only `reference` can be without one; "
         "name it, as in --posteriors.NAME PLACE"),
        (f"ref {LIKE}", "`--posteriors` is missing"),
        (f"nowhere {A} {LIKE}", "There is nothing at nowhere"),
        (f"ref[50:] {A} {LIKE}", "none of them in the rows"),
        (f"ref[0:3] --posteriors.A ref[2:] {LIKE}", "1 networks of A are also in"),
        (f"ref {A} --ood svhn {LIKE}", "`ood` must be one of"),
        (f"ref {A} --samples 1 {LIKE}", "`samples` must be at"),
        (f"ref --posteriors.x/y a {LIKE}", "names become file names"),
        (f"ref --posteriors.A nan {LIKE}", "Every posterior failed"),
        (f"ref {A}", "has a `config.yaml`"),
        (f"ref {A} --data empty.yaml", "must be a configuration with `model.init_args.network`"),
        (f"chain {A} {LIKE}", "one chain of 6 networks"),
    ],
)  # fmt: skip
def test_bad_arguments(here, args, sentence, capsys):
    bank("ref", 6, seed=1)
    bank("a", 3, seed=2)
    bank("chain", 6, seed=1, step=list(range(6)))
    (here / "nan").mkdir()
    (here / "empty.yaml").write_text(json.dumps({"model": {}}))
    with pytest.raises(SystemExit) as end:
        main(["compare", *args.split()])
    assert end.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())

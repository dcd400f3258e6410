"""`lightning-bnn compare`: rows, errors, resuming, traces, and what it refuses."""

import contextlib
import io
import json
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
from lightning_bnn.evaluation.comparison import rows_of
from lightning_bnn.evaluation.problem import Problem, read_problem
from lightning_bnn.evaluation.protocols import PROTOCOLS
from lightning_bnn.evaluation.reference import Reference
from lightning_bnn.evaluation.report import predicted_and_calibrated
from lightning_bnn.evaluation.stored_posteriors import (
    Location,
    StoredPosterior,
    posterior_of,
    read_posterior,
)
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.metrics import law_mmd, mixture_mmd, mmd, mmd_table
from lightning_bnn.models import mlp
from lightning_bnn.modules import MFVI, SWAG, Laplace, MCDropout
from lightning_bnn.posteriors import Empirical
from lightning_bnn.studies.comparisons import COLUMNS
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
    assert found["law"] == pytest.approx(100 * float(mmd(reference, ensemble)))
    mixture, floor = mixture_mmd(reference, ensemble, None)
    assert found["mixture"] == pytest.approx(100 * float(mixture.value))
    assert found["floor"] == pytest.approx(100 * float(floor.value))
    sym = discover(NET, torch.randn(2, 1, 8, 8))
    freed = [canonicalise(stack, sym) for stack in (reference, ensemble)]
    table = mmd_table(*freed)
    assert found["NS law"] == pytest.approx(100 * float(table.reduce("median")))
    data = Digits()
    x, y = data.load().test
    probs = P.apply(NET, ensemble, data.normalise(x)).double().softmax(-1)
    predictions = numbers(folder, "predictions")
    assert row(predictions, "Multi mode", "E")["Acc"] == pytest.approx(
        100 * float((probs.mean(0).argmax(-1) == y).float().mean())
    )
    single = 100 * (probs.argmax(-1) == y).double().mean(1)
    assert row(predictions, "One mode", "E")["Acc"] == pytest.approx(float(single.mean()))
    held = results(folder)["tables"]["predictions"]["rows"]
    (cells,) = (r for r in held if r[:2] == ["One mode", "E"])
    assert cells[2]["error"] == pytest.approx(float(single.std()))


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
    shown = [line.split() for line in out.splitlines() if line.split()[:2] == ["bad", "/"]]
    predicted, calibrated = predicted_and_calibrated(COLUMNS)
    assert shown == [["bad", *["/"] * len(columns)] for columns in (predicted, calibrated)]
    assert any(line.split() == ["bad", "0", "0", *["/"] * 11] for line in out.splitlines())


def test_every_number_can_be_traced(compared):
    folder, _, out = compared["p1"]
    found = results(folder)["settings"]
    assert (found["reference"], found["protocol"], found["samples"]) == ("ref", "p1", 6)
    origin = found["posteriors"]["part"]
    assert origin["rows"] == "1:4"
    assert origin["path"] == "ens"  # as it was given
    written = (p for p in folder.rglob("*") if p.suffix in (".md", ".csv", ".json"))
    assert not any(str(folder.parent) in path.read_text() for path in written)
    assert len(origin["sha256"]) == len(found["config_sha256"]) == 12
    assert results(folder)["version"]
    assert "Reference: 12 networks of ref" in out
    assert "Out of distribution: scrambled" in out
    (kind,) = ((r["kind"], r["modes"]) for r in numbers(folder, "compared") if r["method"] == "E")
    assert kind == ("networks", "5")


def test_a_reference_of_chains_has_no_pairs_within_a_chain(here, capsys):
    steps = {"member": [k % 4 for k in range(12)], "step": [k // 4 for k in range(12)]}
    reference, networks = bank("ref", 12, seed=1, **steps), bank("n", 5, seed=2)
    distances, _ = compare(reference="ref", posteriors__N="n", reference_is="sampled")
    law = law_mmd(reference, networks, None, chains=steps["member"])
    assert row(distances, "", "N")["law"] == pytest.approx(100 * float(law.value))
    out = capsys.readouterr().out
    assert "12 networks of 4 chains, sampled: draws of the posterior" in out
    assert "Noise of" not in out


def test_same_law_lies_at_the_noise_floor_and_another_does_not(here):
    bank("ref", 60, seed=1)
    bank("same", 30, seed=2)
    wide = {n: 2 * t for n, t in P.populate(NET, 30, torch.Generator().manual_seed(3)).items()}
    with CheckpointBank("wide") as held:
        held.extend(wide)
    distances, _ = compare(reference="ref", posteriors__same="same", posteriors__wide="wide")
    table = results("out")["tables"]["distances"]["rows"]
    (noise,) = (r for r in table if r[0] == "Noise of the reference")
    assert abs(row(distances, "", "same")["law"]) < 4 * noise[3]["error"]
    assert row(distances, "", "wide")["law"] > 20 * noise[3]["error"]
    (same,) = (r for r in table if r[0] == "same")
    assert 0.3 * noise[3]["error"] < same[3]["error"] < 4 * noise[3]["error"]


def test_rows_are_computed_once(here, monkeypatch):
    bank("ref", 6, seed=1)
    bank("a", 3, seed=2)
    first = compare(reference="ref", posteriors__A="a")
    calls = []
    kept = comparison.rows_of
    monkeypatch.setattr(comparison, "rows_of", lambda *a: calls.append(a[0].name) or kept(*a))
    assert compare(reference="ref", posteriors__A="a") == first
    assert calls == []
    path = here / "out" / "rows" / "A.json"
    path.write_text(path.read_text()[:100])  # not written to its end
    assert compare(reference="ref", posteriors__A="a") == first
    assert calls.pop() == "A"
    bank("b", 3, seed=3)
    compare(reference="ref", posteriors__A="a", posteriors__B="b")
    assert calls == ["B"]
    compare(reference="ref", posteriors__A="a", seed=1)
    assert calls == ["B", "A"]
    with CheckpointBank("a") as held:
        held.extend(P.populate(NET, 1, torch.Generator().manual_seed(9)))
    compare(reference="ref", posteriors__A="a", seed=1)
    assert calls == ["B", "A", "A"]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (mlp(64, [5], 10), "`1.weight`, of shape .4, 64. there, has shape .5, 64."),
        (nn.Sequential(*NET[:-1], nn.Linear(4, 10, bias=False)), "`3.bias`.* is missing"),
    ],
)
def test_networks_of_another_kind_are_refused(other, sentence):
    problem = Problem(NET, Digits())
    beside = Reference(P.populate(NET, 5), NET, [problem.example()], PROTOCOLS["full"], 4)
    own = Empirical(P.populate(other, 4)).modes()
    sets = [problem.test_set(), problem.ood_set()[1]]
    with pytest.raises(ValueError, match=f"E has other networks than the reference: {sentence}"):
        rows_of(StoredPosterior("E", own, own, other, Categorical()), beside, sets, "entropy")


def test_a_fresh_run_is_read_with_its_own_configuration(here):
    like = str(here / "like.yaml")
    for name, seed in (("ref", 0), ("run", 5)):
        main(
            [
                "fit", "-c", like, "--seed_everything", str(seed),
                "--model.init_args.seed", str(seed), "--model.init_args.members", "4",
                "--trainer.max_epochs", "1", "--trainer.default_root_dir", str(here / name),
                "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false",
            ]
        )  # fmt: skip
    main(["compare", "ref", "--posteriors.E", "run", "--out", "out"])
    assert results("out")["settings"]["posteriors"]["E"]["kind"] == "DeepEnsemble"
    assert results("out")["settings"]["config"].startswith("ref")
    assert row(numbers("out", "predictions"), "Multi mode", "E")["Acc"] > 0


def test_rows_of_a_bank_are_networks_and_of_a_run_members(here):
    problem = read_problem(here / "like.yaml")
    bank("run", 20, seed=2, step=list(range(20)))
    (mode,) = read_posterior("R", Location.of("run[5:12]"), problem).modes
    assert mode.size == 7
    assert torch.equal(mode.networks["1.weight"][0], CheckpointBank("run", "r")[5]["1.weight"])


def test_a_loader_that_shuffles_changes_nothing():
    class Shuffled(Digits):
        def test_dataloader(self):
            sets = [
                torch.utils.data.TensorDataset(self.normalise(x), y)
                for x, y in (self.splits.test, *self.splits.ood.values())
            ]
            return [torch.utils.data.DataLoader(s, 50, shuffle=True) for s in sets]

    networks = P.populate(NET, 4, torch.Generator().manual_seed(3))
    found = []
    for data in (Digits(), Shuffled()):
        problem = Problem(NET, data)
        beside = Reference(P.populate(NET, 5), NET, [problem.example()], PROTOCOLS["full"], 4)
        own = Empirical(networks).modes()
        posterior = StoredPosterior("E", own, own, NET, Categorical())
        rows = rows_of(posterior, beside, [problem.test_set(), problem.ood_set()[1]], "entropy")
        found.append({r.mode: {n: v.value for n, v in r.numbers.items()} for r in rows})
    for mode in ("one", "multi"):
        for name in ("acc", "nll", "ece", "aupr", "idmi"):
            assert found[0][mode][name] == pytest.approx(found[1][mode][name], abs=1e-9)


@pytest.mark.frames
@pytest.mark.parametrize("kind", [SWAG, MCDropout, Laplace, MFVI])
def test_checkpoints_of_modules_that_python_made_are_what_they_are(here, kind):
    options = {"start": 0} if kind is SWAG else {"p": 0.2} if kind is MCDropout else {}
    options |= {"structure": "diag", "prior_std": 1.0} if kind is Laplace else {}
    module, data = kind(mlp(64, [4], 10), members=2, **options), Digits()
    run = L.Trainer(**{**QUIET, "enable_checkpointing": True}, max_epochs=3, default_root_dir=here)
    run.fit(module, data)
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
    """Against fresh samples of the same law."""
    g = torch.Generator().manual_seed(0)
    reference = P.populate(NET, 60, g)
    beside = Reference(reference, NET, [torch.randn(2, 64)], PROTOCOLS["full"], 50)
    floors = beside.noise_floor(50, repeats=150)
    fresh = P.populate(NET, 50 * 50, g)
    found = [
        beside.pooled({n: t[k : k + 50] for n, t in fresh.items()}, [torch.arange(50)])[0]
        for k in range(0, 50 * 50, 50)
    ]
    values = {name: torch.tensor([one[name] for one in found]) for name in ("mmd", "mmd_max")}
    assert floors["mmd"].error == pytest.approx(float(values["mmd"].std()), rel=0.3)
    # the largest of twenty numbers is not around zero, and the floor says where it is
    assert values["mmd_max"].mean() > 5 * values["mmd_max"].std() / 50**0.5
    assert abs(floors["mmd_max"].value - values["mmd_max"].mean()) < floors["mmd_max"].error / 2


def test_parts_are_compared_as_if_they_were_alone():
    reference, y = P.populate(NET, 9), P.populate(NET, 11)
    beside = Reference(reference, NET, [torch.randn(2, 64)], PROTOCOLS["full"])
    rows = torch.tensor([7, 2, 4, 10])
    found, whole = beside.pooled(y, [rows, torch.arange(11)])
    alone = {n: t[rows] for n, t in y.items()}
    assert found["mmd"] == pytest.approx(float(mmd(reference, alone)), abs=1e-7)
    assert whole["mmd_max"] == pytest.approx(float(mmd(reference, y, "max")), abs=1e-7)


def test_a_regression_is_compared_by_its_weights(here):
    net = mlp(8, [4], 1)
    reference, networks = P.populate(net, 6), P.populate(net, 4)
    beside = Reference(reference, net, [torch.randn(2, 8)], PROTOCOLS["full"])
    own = Empirical(networks).modes()
    rows = rows_of(StoredPosterior("G", own, own, net, Gaussian()), beside, [], "entropy")
    assert rows[1].numbers["law"].value == pytest.approx(float(mmd(reference, networks)))
    assert "acc" not in rows[1].numbers


def test_a_bank_below_a_folder_is_found(here):
    bank("logs/version_0/bank", 4, seed=2)
    assert Location.of("logs").file() == Location.of("logs/version_0/bank").path
    bank("logs/version_1/bank", 4, seed=2)
    with pytest.raises(ValueError, match="holds several things"):
        Location.of("logs").file()


def test_a_place_must_be_one_thing(here):
    for name in ("one", "two"):
        folder = here / "runs" / name / "lightning_logs" / "version_0"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text("")
        (folder / "checkpoints" / "last.ckpt").write_text("")
    assert Location.of("runs/one").file().name == "last.ckpt"
    with pytest.raises(ValueError, match="holds several things, name one of them"):
        Location.of("runs").file()
    version = here / "runs/one/lightning_logs/version_0"
    (version / "copy" / "deep").mkdir(parents=True)
    (version / "copy" / "deep" / "config.yaml").write_text("")
    assert Location.of(str(version)).file() == version / "checkpoints" / "last.ckpt"
    (here / "runs" / "two" / "other.ckpt").write_text("")
    with pytest.raises(ValueError, match="holds several things"):
        Location.of("runs/two").file()


def test_which_networks_belong_together():
    rows = {"a/b[:3]": slice(None, 3), "a/b[-3:]": slice(-3, None), "a/b": None}
    assert all(Location.of(text).rows == some for text, some in rows.items())
    assert Location.of("a/b[-:]") == Location(Path("a/b[-:]"))
    assert chains_of([{"member": 0}, {"member": 1}, {"member": 0}]) == [0, 1, 0]
    assert chains_of([{"step": 1}, {"step": 2}]) == [0, 0]
    assert chains_of([{}, {}]) is None
    assert chains_of([{"step": 4}]) is None
    runs = [{"file": f"{run}/{step}.ckpt", "step": step} for run in "ab" for step in (1, 2)]
    assert chains_of(runs) == [0, 0, 1, 1]
    early = [{"file": f"{run}/last.ckpt", "step": k} for k, run in enumerate("abc")]
    assert chains_of(early) is None


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--posteriors.A", "a"], "`reference` is missing"),
        (
            ["--reference", "ref"],
            "`reference` is no option: write it without `--reference`, behind the command",
        ),
        (["ref", "a"], "'a' has no option before it, and only `reference` can be without one"),
        (["ref", "a"], "name it, as in --posteriors.NAME PLACE"),
        (["ref"], "`--posteriors` is missing"),
        (["nowhere", "--posteriors.A", "a"], "There is nothing at nowhere"),
        (["ref[50:]", "--posteriors.A", "a"], "none of them in the rows"),
        (["ref", "--posteriors.A", "ref"], "6 networks of A are also in the reference"),
        (["ref[0:3]", "--posteriors.A", "ref[2:]"], "1 networks of A are also in"),
        (["ref[:4]", "--posteriors.A", "ref[-3:]"], "1 networks of A are also in"),
        (["ref", "--posteriors.A", "a", "--ood", "svhn"], "`ood` must be one of"),
        (["ref", "--posteriors.A", "a", "--samples", "1"], "`samples` must be at"),
        (["ref", "--posteriors.x/y", "a"], "names go into file names"),
        (["ref", "--posteriors.A", "nan"], "Every posterior failed"),
    ],
)
def test_bad_arguments(here, args, sentence, capsys):
    bank("ref", 6, seed=1)
    bank("a", 3, seed=2)
    (here / "nan").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["compare", *args, "--data", "like.yaml"])
    assert end.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_rows_counted_from_the_end_share_no_network(here):
    bank("ref", 6, seed=1)
    main(["compare", "ref[:-3]", "--posteriors.A", "ref[3:]", "--data", "like.yaml"])


@pytest.mark.bad_input
def test_a_configuration_must_be_there_and_say_what_is_needed(here, capsys):
    bank("ref", 6, seed=1)
    bank("a", 3, seed=2)
    args = ["compare", "ref", "--posteriors.A", "a"]
    (here / "empty.yaml").write_text(json.dumps({"model": {}}))
    for more, sentence in (
        ([], "has a `config.yaml`"),
        (["--data", "empty.yaml"], "must be a configuration with `model.init_args.network`"),
    ):
        with pytest.raises(SystemExit):
            main([*args, *more])
        assert sentence in " ".join(capsys.readouterr().err.split())


def test_chains_that_do_not_agree_are_said_to(here, capsys):
    """Around one network each, or around the same one: only then have they converged."""
    g = torch.Generator().manual_seed(0)
    centres = P.populate(NET, 4, g)
    for name, spread in (("apart", 1.0), ("same", 0.0)):
        stack = {
            n: (t[:1] + spread * (t - t[:1])).repeat(30, *(1,) * (t.ndim - 1))
            for n, t in centres.items()
        }
        stack = {n: t + 0.05 * torch.randn(t.shape, generator=g) for n, t in stack.items()}
        with CheckpointBank(name) as held:
            held.extend(stack, [{"member": k % 4, "step": k // 4} for k in range(120)])
    bank("n", 4, seed=2)
    compare(reference="apart", posteriors__N="n")
    assert "NOT CONVERGED" in capsys.readouterr().out
    compare(reference="same", posteriors__N="n")
    out = capsys.readouterr().out
    assert "R-hat of its predictions: median 1.0" in out
    assert "NOT CONVERGED" not in out

"""`lightning-bnn compare`: rows, errors, resuming, traces, and what it refuses."""

import json

import pytest
import torch
from small_runs import NET, bank, config, numbers, results

from lightning_bnn import params as P
from lightning_bnn.cli import main
from lightning_bnn.datamodules import Digits
from lightning_bnn.metrics import mmd, mmd_table
from lightning_bnn.studies import comparison
from lightning_bnn.studies.contenders import Place, chains_of, read_contender
from lightning_bnn.studies.surroundings import read_surroundings
from lightning_bnn.symmetry import canonicalise, discover

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config(tmp_path)
    return tmp_path


def compare(**more):
    args = ["compare", "--like", "like.yaml", "--out", "out"]
    for name, value in more.items():
        args += [f"--{name.replace('__', '.')}", str(value)]
    main(args)
    return numbers("out", "table1"), numbers("out", "table2")


def row(rows, mode, method):
    (found,) = (r for r in rows if (r[""], r["method"]) == (mode, method))
    return found


def test_numbers_of_an_ensemble_are_those_computed_by_hand(here):
    reference, ensemble = bank("ref", 12, seed=1), bank("ens", 5, seed=2)
    one, two = compare(reference="ref", posteriors__E="ens")
    found = row(one, "Multi mode", "E")
    assert found["MMD²"] == pytest.approx(100 * float(mmd(reference, ensemble)))
    sym = discover(NET, torch.randn(2, 1, 8, 8))
    freed = [canonicalise(stack, sym) for stack in (reference, ensemble)]
    table = mmd_table(*freed)
    assert found["NS-MMD²"] == pytest.approx(100 * float(table.reduce("median")))
    kernels = row(two, "Multi mode", "E")
    assert kernels["NS mean"] == pytest.approx(100 * float(table.reduce("mean")))
    assert kernels["NS max"] == pytest.approx(100 * float(table.reduce("max")))
    data = Digits()
    x, y = data.load().test
    probs = P.apply(NET, ensemble, data.normalise(x)).double().softmax(-1)
    assert found["Acc"] == pytest.approx(
        100 * float((probs.mean(0).argmax(-1) == y).float().mean())
    )
    single = 100 * (probs.argmax(-1) == y).double().mean(1)
    assert row(one, "One mode", "E")["Acc"] == pytest.approx(float(single.mean()))
    assert row(one, "One mode", "E")["MMD²"] is None
    held = results("out")["tables"]["table1"]["rows"]
    (cells,) = (r for r in held if r[:2] == ["One mode", "E"])
    assert cells[4]["error"] == pytest.approx(float(single.std()))


def test_chains_of_members_are_modes(here):
    bank("ref", 8, seed=1)
    bank("chains", 12, seed=2, member=[k % 3 for k in range(12)], step=[k // 3 for k in range(12)])
    one, _ = compare(reference="ref", posteriors__C="chains")
    assert row(one, "One mode", "C")["MMD²"] is not None
    around = read_surroundings(here / "like.yaml")
    found = read_contender("C", Place.of("chains"), around)
    assert [mode.size for mode in found.modes] == [4, 4, 4]


def test_one_trajectory_is_one_mode_with_errors_by_a_bootstrap(here):
    bank("ref", 8, seed=1)
    bank("run", 6, seed=2, step=list(range(6)))
    one, _ = compare(reference="ref", posteriors__R="run")
    assert [r["method"] for r in one if r[""] == "Multi mode"] == []
    held = results("out")["tables"]["table1"]["rows"][0]
    assert held[4]["error"] > 0


def test_same_law_lies_at_the_noise_floor_and_another_does_not(here):
    bank("ref", 60, seed=1)
    bank("same", 30, seed=2)
    wide = {n: 2 * t for n, t in P.populate(NET, 30, torch.Generator().manual_seed(3)).items()}
    with comparison_bank("wide") as held:
        held.extend(wide)
    one, _ = compare(reference="ref", posteriors__same="same", posteriors__wide="wide")
    table = results("out")["tables"]["table1"]["rows"]
    (floor,) = (r for r in table if r[0] == "Noise floor")
    assert abs(row(one, "Multi mode", "same")["MMD²"]) < 4 * floor[2]["error"]
    assert row(one, "Multi mode", "wide")["MMD²"] > 20 * floor[2]["error"]


def comparison_bank(path):
    from lightning_bnn.bank import CheckpointBank

    return CheckpointBank(path)


def test_rows_are_computed_once(here, monkeypatch):
    bank("ref", 6, seed=1)
    bank("a", 3, seed=2)
    first = compare(reference="ref", posteriors__A="a")
    calls = []
    kept = comparison.rows_of
    monkeypatch.setattr(comparison, "rows_of", lambda *a: calls.append(a[0].name) or kept(*a))
    assert compare(reference="ref", posteriors__A="a") == first
    assert calls == []
    bank("b", 3, seed=3)
    compare(reference="ref", posteriors__A="a", posteriors__B="b")
    assert calls == ["B"]
    compare(reference="ref", posteriors__A="a", seed=1)
    assert calls == ["B", "A"]
    with comparison_bank("a") as held:
        held.extend(P.populate(NET, 1, torch.Generator().manual_seed(9)))
    compare(reference="ref", posteriors__A="a", seed=1)
    assert calls == ["B", "A", "A"]


def test_every_number_can_be_traced(here):
    bank("ref", 6, seed=1)
    bank("a", 6, seed=2)
    compare(reference="ref[0:5]", posteriors__A="a[1:4]", seed=3, protocol="p1", samples=7)
    found = results("out")["settings"]
    assert found["reference"] == "ref[0:5]"
    assert (found["seed"], found["protocol"], found["samples"]) == (3, "p1", 7)
    origin = found["posteriors"]["A"]
    assert origin["rows"] == "1:4"
    assert origin["path"] == str((here / "a").resolve())
    assert len(origin["sha256"]) == len(found["config_sha256"]) == 12
    assert results("out")["version"]


def test_one_posterior_that_fails_does_not_stop_the_others(here, capsys):
    bank("ref", 6, seed=1)
    bank("a", 3, seed=2)
    (here / "empty").mkdir()
    one, _ = compare(reference="ref", posteriors__A="a", posteriors__bad="empty")
    assert row(one, "", "bad")["Acc"] is None
    out = capsys.readouterr().out
    assert "bad failed." in out
    shown = [line.split() for line in out.splitlines() if line.split()[:2] == ["bad", "/"]]
    assert shown == [["bad", *["/"] * 11]]


def test_networks_in_both_sets_are_refused(here, capsys):
    bank("ref", 6, seed=1)
    bank("copy", 6, seed=1)
    bank("a", 3, seed=2)
    one, _ = compare(reference="ref", posteriors__A="a", posteriors__C="copy")
    assert "6 networks of C are also in the reference" in capsys.readouterr().out
    assert row(one, "", "C")["MMD²"] is None


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
    main(["compare", "--reference", "ref", "--posteriors.E", "run", "--out", "out"])
    assert results("out")["settings"]["posteriors"]["E"]["kind"] == "DeepEnsemble"
    assert results("out")["settings"]["config"].startswith("ref")
    assert row(numbers("out", "table1"), "Multi mode", "E")["Acc"] > 0


def test_rows_in_brackets():
    assert Place.of("a/b[:3]").rows == slice(None, 3)
    assert Place.of("a/b[-3:]").rows == slice(-3, None)
    assert Place.of("a/b").rows is None


def test_which_networks_belong_together():
    assert chains_of([{"member": 0}, {"member": 1}, {"member": 0}]) == [0, 1, 0]
    assert chains_of([{"step": 1}, {"step": 2}]) == [0, 0]
    assert chains_of([{}, {}]) is None
    assert chains_of([{"step": 4}]) is None


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--posteriors.A", "a"], "`--reference` is missing"),
        (["--reference", "ref"], "`--posteriors` is missing"),
        (["--reference", "nowhere", "--posteriors.A", "a"], "There is nothing at nowhere"),
        (["--reference", "ref[50:]", "--posteriors.A", "a"], "none of them in the rows"),
        (["--reference", "ref", "--posteriors.A", "ref"], "A shares networks with the reference"),
        (["--reference", "ref[0:3]", "--posteriors.A", "ref[2:]"], "A shares networks with the"),
        (["--reference", "ref", "--posteriors.A", "a", "--ood", "svhn"], "`ood` must be one of"),
        (["--reference", "ref", "--posteriors.A", "a", "--samples", "1"], "`samples` must be at"),
        (["--reference", "ref", "--posteriors.A", "nan"], "Every posterior failed"),
    ],
)
def test_bad_arguments(here, args, sentence, capsys):
    bank("ref", 6, seed=1)
    bank("a", 3, seed=2)
    (here / "nan").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["compare", *args, "--like", "like.yaml"])
    assert end.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.bad_input
def test_a_configuration_must_be_there_and_say_what_is_needed(here, capsys):
    bank("ref", 6, seed=1)
    bank("a", 3, seed=2)
    args = ["compare", "--reference", "ref", "--posteriors.A", "a"]
    (here / "empty.yaml").write_text(json.dumps({"model": {}}))
    for more, sentence in (
        ([], "has a `config.yaml`"),
        (["--like", "empty.yaml"], "must be a configuration with `model.init_args.network`"),
    ):
        with pytest.raises(SystemExit):
            main([*args, *more])
        assert sentence in " ".join(capsys.readouterr().err.split())

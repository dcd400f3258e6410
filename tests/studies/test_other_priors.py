"""A method with another prior is of another posterior, and the score says so."""

from lightning_bnn.commands.presets import preset_text
from lightning_bnn.studies.fidelity import _other_priors


def test_another_prior_is_named_and_the_same_one_is_not(tmp_path):
    for name, std in (("same", "1.0"), ("other", "0.5")):
        folder = tmp_path / name
        (folder / "bank").mkdir(parents=True)
        (folder / "bank" / "manifest.jsonl").touch()
        text = preset_text("reference_digits").replace("prior_std: 1.0", f"prior_std: {std}")
        (folder / "config.yaml").write_text(text)
    (tmp_path / "loose").mkdir()
    places = {name: str(tmp_path / name / "bank") for name in ("same", "other")}
    (note,) = _other_priors("digits", places | {"loose": str(tmp_path / "loose")})
    assert note == "other has `prior_std` 0.5, the reference 1.0: it is of another posterior."

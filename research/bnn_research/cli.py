"""The console script of this project: studies of the papers, and the sampling of references."""

from __future__ import annotations

from collections.abc import Sequence

from weightsym import Script

STUDIES = {
    "toy": "P1, figures 1 and 5: ten thousand perceptrons of two units, raw, scaled, sorted",
    "mass": "P1, figure 2: mass of networks, and its minimum over all rescalings",
    "collapse": "P1, figures 3, 7, 8: mutual information of all pairs of an ensemble",
    "permutations": "P1, figure 4: changes in the order of units during training",
    "marginals": "P1, figure 9: marginals with and without symmetries, and tests of them",
    "interpolation": "P2, section 3: one Gaussian for two modes, between them or on one",
    "width": "P2, table 1: symmetrized VI by the width of the network",
    "tractable": "P2, tables 2 and 3: two ReLU units, with and without symmetrization",
    "transpositions": "P3, figures 1 and 2: barriers, distances and swaps between networks",
    "compact": "P3, table 1 and figure 3: posteriors as one Gaussian, matched or not; pruning",
    "reproduce": "run all of these, and judge every claim of the papers by the numbers",
}
"""Tables and figures of the papers."""
REFERENCES = {
    "leaderboard": "train all methods of the package, and score them at equal cost in gradients",
    "alignment": "planted permutations, barriers of pairs, and averages across runs",
    "lineage": "children of networks, attacked, and who finds them: our tests and published ones",
    "rebase": "vision transformers: what fine-tuning has learnt, on a base of another seed",
    "seeds": "transformers of other seeds: barriers after every way of alignment",
    "uci": "all methods on the UCI tables and their published splits, beside published results",
    "reference": "sample a new reference yourself, by long chains, with its diagnostics",
    "sbc": "test the sampler of a reference on simulated data of known weights",
    "posteriordb": "write a reference in the format of posteriordb",
    "presets": "list the configurations of the papers and of the references, or print one",
}
"""References, published results and presets."""
EVERY = {**STUDIES, **REFERENCES}
_ELSEWHERE = {
    "reference": "references.sampling",
    "posteriordb": "references.posteriordb",
    "sbc": "references.ranks",
}
"""Commands whose functions are in files of other names."""


def main(args: Sequence[str] | None = None) -> None:
    """Run one command. A mistake of the user ends it with one sentence and exit code 2."""
    Studies().main(args)


class Studies(Script):
    """The console script of a clone; P1, P2 and P3 are the papers of the README."""

    program, commands = "bnn-research", EVERY
    resumed = (
        "toy", "mass", "collapse", "marginals", "permutations", "width", "compact", "reproduce",
        "reference", "leaderboard", "lineage", "uci",
    )  # fmt: skip

    def module_of(self, name: str) -> str:
        """Return the module of a command."""
        return f"bnn_research.{_ELSEWHERE.get(name, name)}"


if __name__ == "__main__":
    main()

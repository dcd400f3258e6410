"""Posteriors of low-rank adapters of a small BERT, next to one more network and a temperature.

python benchmarks/bayesian_adapters.py [--seeds 3]

Texts are written by Markov chains over thirty letters, so that the best accuracy is known. A BERT
of two layers learns to tell twelve chains apart; adapters of rank four and a head then learn four
other chains from 200 texts. All take the same 400 steps of AdamW, but IVON, which has its own. In
shifted texts a third of the letters are random.
"""

import copy
import time
import warnings

import lightning as L
import peft
import torch
import transformers
from record import Record, parsed, parser
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import samplers
from lightning_bnn.calibration.calibrators import fit
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.modules import (
    IVON,
    SWAG,
    TFB,
    DeepEnsemble,
    Laplace,
    MCDropout,
    ScalaBL,
)
from lightning_bnn.predictions import Predictions

warnings.filterwarnings("ignore")
LETTERS, LENGTH, OTHERS, CHAINS = 30, 24, 12, 4
LABELLED, HELD_OUT, BATCH, STEPS, PRETRAINING, RATE = 200, 1000, 20, 400, 1500, 3e-3
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Chains:
    """Markov chains that have part of their transitions in common."""

    def __init__(self, logs) -> None:
        self.logs = logs

    def texts(self, count):
        """Texts and the numbers of their chains."""
        labels = torch.arange(count) % len(self.logs)
        letters = [torch.randint(LETTERS, (count,))]
        for _ in range(LENGTH - 1):
            rows = self.logs[labels, letters[-1]].exp()
            letters.append(torch.multinomial(rows, 1)[:, 0])
        return torch.stack(letters, 1), labels

    def log_likelihoods(self, texts):
        """Of every chain; their softmax is the best prediction there is."""
        return self.logs[:, texts[:, :-1], texts[:, 1:]].sum(-1).T


def two_sets():
    """Chains to learn from, and others."""
    shared, own = torch.randn(LETTERS, LETTERS), torch.randn(OTHERS + CHAINS, LETTERS, LETTERS)
    logs = (shared + own).log_softmax(-1)
    return Chains(logs[:OTHERS]), Chains(logs[OTHERS:])


def shifted(texts):
    """Texts with random letters."""
    random = torch.randint_like(texts, LETTERS)
    return torch.where(torch.rand(texts.shape) < 1 / 3, random, texts)


def pretrained(chains):
    """A BERT that tells chains apart."""
    config = transformers.BertConfig(
        vocab_size=LETTERS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=LENGTH, num_labels=len(chains.logs),
    )  # fmt: skip
    net = transformers.BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, PRETRAINING)
    for _ in range(PRETRAINING):
        texts, labels = chains.texts(96)
        optimizer.zero_grad()
        cross_entropy(net(texts).logits, labels).backward()
        optimizer.step()
        schedule.step()
    return net


def adapted(base, dropout=0.0):
    """The same network with new adapters and a head, which alone are trained."""
    config = copy.deepcopy(base.config)
    config.num_labels = CHAINS
    net = transformers.BertForSequenceClassification(config)
    net.bert.load_state_dict(base.bert.state_dict())
    for part in net.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=dropout
    )
    return peft.get_peft_model(net, config)


def adamw(parameters):
    return torch.optim.AdamW(parameters, RATE, weight_decay=0.0)


def ivon(parameters):
    return samplers.IVON(parameters, lr=0.1, hessian_init=0.1, hessian_momentum=0.999)


def trained(module, texts, labels):
    loader = DataLoader(TensorDataset(texts, labels), BATCH, shuffle=True)
    trainer = L.Trainer(max_epochs=STEPS * BATCH // LABELLED, enable_model_summary=False, **QUIET)
    trainer.fit(module, loader)
    return module


def contestants(base, texts, labels):
    """What predicts, by name."""
    common = {"optimizer": adamw}
    start = adapted(base)
    plain = trained(DeepEnsemble(copy.deepcopy(start), members=1, **common), texts, labels)
    noisy = TFB(plain.member(0), tolerance=0.01)
    noisy.method.at_end(noisy.state, [_batch(texts, labels)], noisy.run)
    yield "MLE", plain
    yield "TFB", noisy
    made = {
        "two networks": lambda: DeepEnsemble(start, members=2, **common),
        "MAP": lambda: DeepEnsemble(start, members=1, prior_std=0.3, **common),
        "dropout": lambda: MCDropout(adapted(base, 0.1), **common),
        "ensemble of 5": lambda: DeepEnsemble(start, members=5, **common),
        "Laplace": lambda: Laplace(start, structure="kron", **common),
        "IVON": lambda: IVON(start, optimizer=ivon),
        "SWAG": lambda: SWAG(start, swa_lr=RATE, **common),
        "ScalaBL": lambda: ScalaBL(start, **common),
    }
    for name, make in made.items():
        yield name, trained(make(), texts, labels)


def _batch(texts, labels):
    from lightning_bnn.methods import Batch

    return Batch((texts,), labels)


def judged(module, held_out, test, strange):
    """Numbers on test texts and on shifted ones, after a temperature, and the cost of a text."""
    start = time.process_time()
    known = Predictions.of(module.likelihood, module.outputs((test[0],)), test[1])
    cost = 1e3 * (time.process_time() - start) / len(test[0])
    far = Predictions.of(module.likelihood, module.outputs((strange,)), test[1])
    held = Predictions.of(module.likelihood, module.outputs((held_out[0],)), held_out[1])
    numbers = known.numbers("acc", "nll", "ece")
    numbers["nll_t"] = known.calibrated(fit(held, "temperature")).numbers("nll")["nll"]
    moved = far.numbers("nll", "ece")
    return {**numbers, "nll_shift": moved["nll"], "ece_shift": moved["ece"], "ms": cost}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=3)
    options = parsed(made)
    record = Record(options)
    for seed in range(options.seeds):
        L.seed_everything(seed, verbose=False)
        others, chains = two_sets()
        base, data = pretrained(others), chains.texts(LABELLED)
        held_out, test = chains.texts(HELD_OUT), chains.texts(HELD_OUT)
        strange = shifted(test[0])
        logs = chains.log_likelihoods(test[0])
        best = Predictions.of(Categorical(), logs[None], test[1]).numbers("acc", "nll", "ece")
        for name, value in best.items():
            record.value("best possible", value, seed=seed, number=name)
        for who, module in contestants(base, *data):
            with torch.no_grad():
                numbers = judged(module.eval(), held_out, test, strange)
            for name, value in numbers.items():
                record.value(who, value, seed=seed, number=name)
    record.write()


if __name__ == "__main__":
    main()

"""Posteriors of a few weights of a large network: memory, checkpoints, transformers and peft."""

import copy
import math

import lightning as L
import pytest
import torch
from module_cases import MODULES, OF_EACH_CLASS, Blobs, adam, ivon, trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_bnn.callbacks import PosteriorDoctor
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.modules import IVON, MFVI, SWAG, DeepEnsemble, Laplace
from lightning_bnn.posteriors import merge_gaussians, transform_gaussian
from lightning_bnn.symmetry import canonicalise, discover, random_mixings
from weightsym import params as P
from weightsym.matching.matrices import isometric
from weightsym.verify import random_element

WIDTH = 64
CASES = {
    DeepEnsemble: {"optimizer": adam},
    MFVI: {"optimizer": adam, "init_std": 0.01},
    IVON: {"optimizer": ivon},
    SWAG: {"optimizer": adam, "start": 0},
    Laplace: {"optimizer": adam, "structure": "diag"},
}


def backbone():
    """A head that is trained on a large network that is not."""
    torch.manual_seed(0)
    body = [nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)]
    net = nn.Sequential(*body, nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 3))
    return net.requires_grad_(False).train().apply(_train_the_head)


def _train_the_head(part):
    if isinstance(part, nn.Linear) and (part.in_features == 4 or part.out_features == 4):
        part.requires_grad_(True)


def copies_of(tensor, *holders):
    """How many different memories of these hold the numbers of a tensor."""
    every = [t for holder in holders for t in holder]
    alike = [t for t in every if t.shape[-tensor.ndim :] == tensor.shape]
    return len({t.untyped_storage().data_ptr() for t in alike})


@pytest.mark.parametrize("name", [*OF_EACH_CLASS, "mfvi local", "laplace full"])
def test_fixed_weights_are_there_once(name):
    net = backbone()
    module = MODULES[name](net, eval_samples=2)
    trainer(max_epochs=3).fit(module, Blobs())
    stack, drawn = module.member_stack(), module.posterior().sample(1)
    held = [*module.parameters(), *module.buffers(), *module.template.buffers()]
    assert copies_of(net[2].weight, held, stack.values(), drawn.values()) == 1
    assert copies_of(net[6].weight, held, stack.values(), drawn.values()) > 1
    member = module.member(module.members - 1)
    assert torch.equal(member[2].weight, net[2].weight)
    assert not torch.equal(member[6].weight, net[6].weight)
    assert member.state_dict().keys() == net.state_dict().keys()
    assert [p.requires_grad for p in member.parameters()] == [
        p.requires_grad for p in net.parameters()
    ]


@pytest.mark.parametrize("make", [MFVI, SWAG])
def test_a_checkpoint_holds_what_is_trained_and_knows_its_backbone(make, tmp_path):
    net = backbone()
    module = make(net, members=2, **CASES[make])
    run = trainer(max_epochs=2)
    run.fit(module, Blobs())
    run.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert not any(t.shape[-2:] == (WIDTH, WIDTH) for t in content["state_dict"].values())
    x = torch.randn(5, 6)
    again = make.load_from_checkpoint(tmp_path / "a.ckpt", network=net, members=2, **CASES[make])
    torch.testing.assert_close(again.eval()(x), module.eval()(x))
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[2].weight.copy_(other[2].weight.flip(0))
    with pytest.raises(ValueError, match="has other weights that are held fixed than `network`"):
        make.load_from_checkpoint(tmp_path / "a.ckpt", network=other, members=2, **CASES[make])
    half = copy.deepcopy(net).bfloat16().float()  # the same network, after a trip
    make.load_from_checkpoint(tmp_path / "a.ckpt", network=half, members=2, **CASES[make])


def test_a_member_may_be_changed_without_changing_the_others():
    net = backbone()
    module, x = DeepEnsemble(net, members=2).eval(), torch.randn(5, 6)
    before = module(x)
    with torch.no_grad():
        for p in module.member(0).parameters():
            p.zero_()
    torch.testing.assert_close(module(x), before)
    assert net[2].weight.abs().sum() > 0


def test_a_fixed_last_layer_has_no_laplace_approximation():
    net = backbone()
    net[6].requires_grad_(False)
    with pytest.raises(ValueError, match="The last layer, '6', has no weights of its own"):
        Laplace(net, layers="last")


def test_another_run_starts_from_members_whose_backbone_is_shared(tmp_path):
    net = backbone()
    module = DeepEnsemble(net, members=2, optimizer=adam)
    run = trainer(max_epochs=1)
    run.fit(module, Blobs())
    run.save_checkpoint(tmp_path / "a.ckpt")
    start = DeepEnsemble(net, members=1, start_from=str(tmp_path / "a.ckpt"))
    wanted = module.member_stack()
    assert all(torch.equal(t[0], wanted[n][1]) for n, t in start.member_stack().items())
    other = copy.deepcopy(net)
    other[2].weight.data.mul_(-1)
    with pytest.raises(ValueError, match="has other weights that are held fixed"):
        DeepEnsemble(other, members=1, start_from=str(tmp_path / "a.ckpt"))


def test_a_network_of_which_nothing_is_trained_is_that_of_its_stack():
    net = backbone().requires_grad_(False)
    module = DeepEnsemble(net)
    assert module.member_stack().keys() == net.state_dict().keys()
    module.double()
    assert net[0].weight.dtype == torch.float32


def test_tied_fixed_weights_stay_tied():
    net = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 9))
    net[3].weight = net[0].weight
    net.requires_grad_(False)
    net[2].requires_grad_(True)
    member = DeepEnsemble(net, members=2).member(1)
    assert member[3].weight is member[0].weight
    assert list(DeepEnsemble(net).member_stack()) == ["2.weight", "2.bias"]


def test_a_bias_beside_a_fixed_weight_is_drawn_as_its_layer_draws_it():
    net = backbone()
    net[2].bias.requires_grad_(True)
    before = net[2].weight.clone()
    stack = DeepEnsemble(net, members=3).member_stack()
    assert torch.equal(net[2].weight, before)
    assert stack["2.bias"].abs().max() <= WIDTH**-0.5
    assert not torch.equal(stack["2.bias"][0], stack["2.bias"][1])


def test_memory_is_known_before_anything_is_allocated():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    net[0].requires_grad_(False)
    text = DeepEnsemble(net, members=3).memory()
    assert text == (
        "members take 120 kB, their gradients 120 kB, an optimizer like Adam 240 kB, "
        "weights that are held fixed 4 MB"
    )


# ------------------------------------------------------------ transformers and peft
VOCABULARY, TOKENS = 40, 6
IGNORED = -100


class Texts(L.LightningDataModule):
    """Token numbers, some of which are padding, and labels as transformers have them."""

    def __init__(self, kind):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.rows = []
        for k in range(16):
            ids = torch.randint(VOCABULARY, (TOKENS,), generator=g)
            mask = (torch.arange(TOKENS) < TOKENS - k % 3).long()
            labels = {"sequences": ids[0] % 3, "tokens": ids % 3, "causal": ids}[kind]
            labels = labels if kind == "sequences" else labels.where(mask > 0, IGNORED)
            row = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            self.rows.append(row)

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=5)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


LIKELIHOODS = {
    "sequences": Categorical(),
    "tokens": Categorical(ignore_index=IGNORED),
    "causal": Categorical(ignore_index=IGNORED, next_token=True),
}


def transformer(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "causal":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    task = {"sequences": "Sequence", "tokens": "Token"}[kind]
    config = transformers.BertConfig(num_labels=3, **sizes)
    return getattr(transformers, f"BertFor{task}Classification")(config)


def adapted(kind):
    peft = pytest.importorskip("peft")
    task = {"sequences": "SEQ_CLS", "tokens": "TOKEN_CLS", "causal": "CAUSAL_LM"}[kind]
    targets = ["q_proj", "v_proj"] if kind == "causal" else ["query", "value"]
    config = peft.LoraConfig(task_type=task, r=2, target_modules=targets)
    return peft.get_peft_model(transformer(kind), config)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("make", "kind"),
    [(make, "sequences") for make in CASES]
    + [(DeepEnsemble, "tokens"), (IVON, "tokens"), (MFVI, "causal"), (SWAG, "causal")],
)
def test_a_posterior_over_an_adapter(make, kind):
    net = adapted(kind)
    module = make(net, likelihood=LIKELIHOODS[kind], members=2, eval_samples=3, **CASES[make])
    data, run = Texts(kind), trainer(max_epochs=2)
    run.fit(module, data)
    weights = sum(t[0].numel() for t in module.member_stack().values())
    assert weights == sum(p.numel() for p in net.parameters() if p.requires_grad)
    (found,) = run.validate(module, data, verbose=False)
    batches = list(data.train_dataloader())
    predicted = torch.cat([p.samples for p in run.predict(module, data)], 1)
    labels = torch.cat([b["labels"] for b in batches])
    if kind == "causal":
        predicted, labels = predicted[:, :, :-1], labels[:, 1:]
    mean = predicted.softmax(-1).mean(0).flatten(0, -2).log()
    wanted = F.nll_loss(mean, labels.flatten(), ignore_index=IGNORED)
    assert found["val/nll"] == pytest.approx(wanted.item(), abs=1e-5)
    if kind == "sequences":
        assert "val/sequence_nll" not in found
        return
    counts = labels != IGNORED
    index = labels.where(counts, 0).expand(predicted.shape[:-1])[..., None]
    tokens = predicted.double().log_softmax(-1).gather(-1, index)[..., 0].where(counts, 0)
    of_texts = math.log(len(tokens)) - tokens.sum(-1).logsumexp(0)
    assert found["val/sequence_nll"] == pytest.approx(of_texts.mean().item(), abs=1e-5)


@pytest.mark.e2e
@pytest.mark.parametrize("structure", ["kron", "diag"])
@pytest.mark.parametrize("kind", ["sequences", "tokens"])
def test_a_laplace_of_an_adapter(structure, kind):
    for layers in (None, "last"):
        module = Laplace(
            adapted(kind), likelihood=LIKELIHOODS[kind], structure=structure, layers=layers,
            optimizer=adam, eval_samples=3, prior_precision=1.0,
        )  # fmt: skip
        run = trainer(max_epochs=1)
        run.fit(module, Texts(kind))
        (found,) = run.validate(module, Texts(kind), verbose=False)
        assert found["val/mi"] > 0


@pytest.mark.e2e
def test_further_adapters_start_as_peft_starts_them():
    net = adapted("sequences")
    stack = DeepEnsemble(net, members=3).member_stack()
    left = [t for n, t in stack.items() if "lora_B" in n]
    right = [t for n, t in stack.items() if "lora_A" in n]
    assert left
    assert all((t == 0).all() for t in left)
    assert all((t[1] != t[2]).any() for t in right)


@pytest.mark.e2e
def test_adapters_that_belong_to_a_changed_backbone_stay_with_it():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="TOKEN_CLS", r=2, init_lora_weights="pissa")
    net = peft.get_peft_model(transformer("tokens"), config)
    stack = DeepEnsemble(net, members=2).member_stack()
    factors = [t for n, t in stack.items() if "lora_" in n]
    assert factors
    assert all(torch.equal(t[0], t[1]) for t in factors)


@pytest.mark.e2e
def test_a_member_of_an_adapter_may_be_merged():
    module = DeepEnsemble(adapted("tokens"), likelihood=LIKELIHOODS["tokens"], members=2).eval()
    for p in module.state.parameters():
        p.data.normal_(std=0.5)
    ids = torch.stack([row["input_ids"] for row in Texts("tokens").rows])
    before = module(ids)
    merged = module.member(0).eval().merge_and_unload()
    torch.testing.assert_close(
        merged(ids).logits.softmax(-1), module.outputs((ids,))[0].softmax(-1)
    )
    torch.testing.assert_close(module(ids), before)


class Twice(Texts):
    """The same texts in and out of distribution."""

    def test_dataloader(self):
        return [self.train_dataloader(), self.train_dataloader()]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["tokens", "causal"])
def test_equal_texts_are_not_told_apart_by_what_does_not_count(kind):
    module = DeepEnsemble(adapted(kind), likelihood=LIKELIHOODS[kind], members=2)
    for p in module.state.parameters():
        p.data.normal_(std=0.5)
    module.has_weights = True
    (first, *rest) = trainer().test(module, Twice(kind), verbose=False)
    found = {**first, **{k: v for more in rest for k, v in more.items()}}
    assert found["test/ood/AUROC"] == pytest.approx(0.5)
    assert found["test/ood/mi"] == pytest.approx(found["test/mi"])


@pytest.mark.e2e
def test_what_peft_would_pass_by_is_refused():
    rows = [{**row, "token_type_ids": row["input_ids"] * 0} for row in Texts("sequences").rows]
    loader = DataLoader(rows, batch_size=4)
    with pytest.raises(ValueError, match=r"'token_type_ids' .* pass `network.get_base_model\(\)`"):
        trainer().fit(DeepEnsemble(adapted("sequences"), optimizer=adam), loader)
    inner = DeepEnsemble(adapted("sequences").get_base_model(), optimizer=adam)
    trainer().fit(inner, loader)
    assert any("lora_A" in name for name in inner.member_stack())


@pytest.mark.e2e
def test_a_doctor_looks_at_tokens(tmp_path):
    module = DeepEnsemble(
        adapted("tokens"), likelihood=LIKELIHOODS["tokens"], members=2, optimizer=adam
    )
    doctor = PosteriorDoctor()
    run = trainer(max_epochs=2, callbacks=[doctor], default_root_dir=tmp_path)
    run.fit(module, Texts("tokens"))
    with pytest.raises(ValueError, match="Classes at several positions are not calibrated"):
        module.calibrate(Texts("tokens"))


@pytest.mark.e2e
def test_further_networks_start_as_transformers_start_them():
    net = transformer("sequences")
    drawn = P.populate(net, 200, torch.Generator().manual_seed(0))
    weight = drawn["bert.encoder.layer.0.intermediate.dense.weight"]
    assert weight.std().item() == pytest.approx(net.config.initializer_range, rel=0.05)
    assert (drawn["bert.encoder.layer.0.intermediate.dense.bias"] == 0).all()


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["tokens", "causal"])
def test_factors_of_adapters_have_one_form_in_an_orbit(kind):
    module = DeepEnsemble(adapted(kind), members=2).double()
    with torch.no_grad():
        for p in module.state.parameters():
            p += torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) / 10
    row = Texts(kind).rows[0]
    example = row["input_ids"][None], row["attention_mask"][None]
    template, stack = module.template.eval(), module.member_stack()
    sym = discover(template, *example)
    assert len(sym.linear) == 2
    moved = random_element(stack, sym, torch.Generator().manual_seed(0), mixing=True)
    assert not torch.allclose(moved[next(iter(moved))], stack[next(iter(stack))])
    forms = [canonicalise(networks, sym, mixing="balanced") for networks in (stack, moved)]
    for name in stack:
        torch.testing.assert_close(forms[0][name], forms[1][name], rtol=1e-6, atol=1e-8)
    outputs = [P.apply(template, networks, *example) for networks in (stack, forms[1])]
    torch.testing.assert_close(*outputs)
    wrong = {n: t.flip(1) if "lora_A" in n else t for n, t in stack.items()}
    assert not torch.allclose(P.apply(template, wrong, *example), outputs[0])


@pytest.mark.e2e
def test_adapters_in_other_frames_are_merged_to_one_function():
    module = IVON(adapted("tokens"), likelihood=LIKELIHOODS["tokens"]).double()
    row = Texts("tokens").rows[0]
    example = row["input_ids"][None], row["attention_mask"][None]
    template, one = module.template.eval(), module.posterior()
    with torch.no_grad():
        one.mean += torch.randn(one.mean.shape, generator=torch.Generator().manual_seed(0)) / 3
        one.log_std.fill_(-3.0)
    sym = discover(template, *example)
    turns = random_mixings(isometric(sym), torch.Generator().manual_seed(1))
    other = transform_gaussian(one, sym, matrices=turns)
    wanted = P.apply(template, P.stack([one.centre, other.centre]), *example)
    torch.testing.assert_close(wanted[0], wanted[1])
    merged, naive = merge_gaussians([one, other], symmetries=sym), merge_gaussians([one, other])
    found, wrong = P.apply(template, P.stack([merged.centre, naive.centre]), *example)
    torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-5)
    assert (wrong - wanted[0]).abs().max() > 1e-3
    torch.testing.assert_close(merged.log_std, one.log_std - math.log(2) / 2, atol=1e-5, rtol=0)


def test_an_object_without_logits_is_refused_in_one_sentence():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    with pytest.raises(ValueError, match="wrap it in a module that picks the outputs"):
        trainer().fit(DeepEnsemble(Pair(6, 3), optimizer=adam), Blobs())

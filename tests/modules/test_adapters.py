"""Posteriors of a few weights of a large network: memory, checkpoints, transformers and peft."""

import copy
import math

import lightning as L
import pytest
import torch
from module_cases import MODULES, OF_EACH_CLASS, adam, fitted, ivon, saved, trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_bnn.callbacks import PosteriorDoctor
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.modules import IVON, MFVI, SWAG, TFB, DeepEnsemble, Laplace, ScalaBL

WIDTH = 64
CASES = {
    DeepEnsemble: {"optimizer": adam},
    MFVI: {"optimizer": adam, "init_std": 0.01},
    IVON: {"optimizer": ivon},
    SWAG: {"optimizer": adam, "start": 0},
    Laplace: {"optimizer": adam, "structure": "diag"},
    TFB: {"optimizer": adam},
    ScalaBL: {"optimizer": adam},
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


@pytest.mark.parametrize("name", [*OF_EACH_CLASS, "mfvi local"])
def test_fixed_weights_are_there_once(name):
    net = backbone()
    module = MODULES[name](net, eval_samples=2)
    fitted(module, max_epochs=3)
    stack, drawn = module.member_stack(), module.posterior().sample(1)
    held = [*module.parameters(), *module.buffers(), *module.template.buffers()]
    assert copies_of(net[2].weight, held, stack.values(), drawn.values()) == 1
    assert copies_of(net[6].weight, held, stack.values(), drawn.values()) > 1
    member = module.member(module.members - 1)
    assert torch.equal(member[2].weight, net[2].weight)
    assert not torch.equal(member[6].weight, net[6].weight)
    assert member.state_dict().keys() == net.state_dict().keys()
    needed = [[p.requires_grad for p in one.parameters()] for one in (member, net)]
    assert needed[0] == needed[1]
    for p in member.parameters():
        p.data.zero_()
    assert net[2].weight.abs().sum() > 0  # a member may be changed


OTHER = "has different fixed weights"


@pytest.mark.parametrize("make", [DeepEnsemble, MFVI, SWAG])
def test_a_checkpoint_holds_what_is_trained_and_knows_its_backbone(make, tmp_path):
    net, options = backbone(), {"members": 2, **CASES[make]}
    module = make(net, **options)
    path = saved(fitted(module), tmp_path / "a.ckpt")
    content = torch.load(path, weights_only=True)
    assert not any(t.shape[-2:] == (WIDTH, WIDTH) for t in content["state_dict"].values())
    x = torch.randn(5, 6)
    again = make.load_from_checkpoint(path, network=net, **options)
    torch.testing.assert_close(again.eval()(x), module.eval()(x))
    other = copy.deepcopy(net)
    other[2].weight.data = other[2].weight.data.flip(0)
    with pytest.raises(ValueError, match=OTHER):
        make.load_from_checkpoint(path, network=other, **options)
    if make is DeepEnsemble:
        start = make(net, members=1, start_from=str(path)).member_stack()
        assert all(torch.equal(t[0], module.member_stack()[n][1]) for n, t in start.items())
        with pytest.raises(ValueError, match=OTHER):
            make(other, members=1, start_from=str(path))
    half = copy.deepcopy(net).bfloat16().float()  # the same network, after a trip
    make.load_from_checkpoint(path, network=half, **options)


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
    drawn = DeepEnsemble(net, members=3).member_stack()["2.bias"]
    assert torch.equal(net[2].weight, before)
    assert drawn.abs().max() <= WIDTH**-0.5
    assert not torch.equal(drawn[0], drawn[1])


def test_memory_is_known_before_anything_is_allocated():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    net[0].requires_grad_(False)
    text = DeepEnsemble(net, members=3).memory()
    assert text == (
        "members take 120 kB, their gradients 120 kB, an optimizer like Adam 240 kB, "
        "weights held fixed 4 MB"
    )


# ------------------------------------------------------------ transformers and peft
VOCABULARY, TOKENS = 40, 6
IGNORED = -100


def texts(kind):
    """Token numbers, some of which are padding, and labels as transformers have them."""
    g = torch.Generator().manual_seed(0)
    for k in range(16):
        ids = torch.randint(VOCABULARY, (TOKENS,), generator=g)
        mask = (torch.arange(TOKENS) < TOKENS - k % 3).long()
        labels = {"sequences": ids[0] % 3, "tokens": ids % 3, "causal": ids}[kind]
        labels = labels if kind == "sequences" else labels.where(mask > 0, IGNORED)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loader(kind):
    return DataLoader(list(texts(kind)), batch_size=5)


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


def ensemble(kind, **options):
    """Two members that differ in all that is trained."""
    module = DeepEnsemble(
        adapted(kind), likelihood=LIKELIHOODS[kind], members=2, optimizer=adam, **options
    )
    for p in module.state.parameters():
        p.data.normal_(std=0.5)
    return module.eval()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("make", "kind", "options"),
    [(make, "sequences", {}) for make in CASES]
    + [(DeepEnsemble, "tokens", {}), (IVON, "tokens", {}), (MFVI, "causal", {})]
    + [(SWAG, "causal", {}), (Laplace, "tokens", {"structure": "kron"})]
    + [(Laplace, "sequences", {"structure": "kron", "layers": "last"})],
)
def test_a_posterior_over_an_adapter(make, kind, options):
    net, data = adapted(kind), loader(kind)
    options = {"members": 2, "eval_samples": 3, **CASES[make], **options}
    module = make(net, likelihood=LIKELIHOODS[kind], **options)
    run = fitted(module, data)
    weights = sum(t[0].numel() for t in module.member_stack().values())
    assert weights == sum(p.numel() for p in net.parameters() if p.requires_grad)
    (found,) = run.validate(module, data, verbose=False)
    predicted = torch.cat([p.samples for p in run.predict(module, data)], 1)
    labels = torch.cat([b["labels"] for b in data])
    if kind == "causal":
        predicted, labels = predicted[:, :, :-1], labels[:, 1:]
    mean = predicted.softmax(-1).mean(0).flatten(0, -2).log()
    wanted = F.nll_loss(mean, labels.flatten(), ignore_index=IGNORED)
    assert found["val/nll"] == pytest.approx(wanted.item(), abs=1e-5)
    assert found["val/mi"] > 0
    if kind == "sequences":
        assert "val/sequence_nll" not in found
        return
    counts = labels != IGNORED
    index = labels.where(counts, 0).expand(predicted.shape[:-1])[..., None]
    tokens = predicted.double().log_softmax(-1).gather(-1, index)[..., 0].where(counts, 0)
    of_texts = math.log(len(tokens)) - tokens.sum(-1).logsumexp(0)
    assert found["val/sequence_nll"] == pytest.approx(of_texts.mean().item(), abs=1e-5)


@pytest.mark.e2e
def test_further_adapters_start_as_peft_starts_them():
    """Those that belong to a changed backbone stay with it."""
    peft = pytest.importorskip("peft")
    stack = DeepEnsemble(adapted("sequences"), members=3).member_stack()
    left, right = ([t for n, t in stack.items() if f"lora_{k}" in n] for k in "BA")
    assert left
    assert all((t == 0).all() for t in left)
    assert all((t[1] != t[2]).any() for t in right)
    config = peft.LoraConfig(task_type="TOKEN_CLS", r=2, init_lora_weights="pissa")
    net = peft.get_peft_model(transformer("tokens"), config)
    factors = [t for n, t in DeepEnsemble(net, members=2).member_stack().items() if "lora_" in n]
    assert factors
    assert all(torch.equal(t[0], t[1]) for t in factors)


@pytest.mark.e2e
def test_a_member_of_an_adapter_may_be_merged():
    module, (ids, *_) = ensemble("tokens"), (batch["input_ids"] for batch in loader("tokens"))
    before = module(ids)
    merged = module.member(0).eval().merge_and_unload()
    wanted = module.outputs((ids,))[0].softmax(-1)
    torch.testing.assert_close(merged(ids).logits.softmax(-1), wanted)
    torch.testing.assert_close(module(ids), before)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["tokens", "causal"])
def test_equal_texts_are_not_told_apart_by_what_does_not_count(kind):
    module = ensemble(kind)
    module.has_weights = True
    (first, *rest) = trainer().test(module, [loader(kind), loader(kind)], verbose=False)
    found = {**first, **{k: v for more in rest for k, v in more.items()}}
    assert found["test/ood/AUROC"] == pytest.approx(0.5)
    assert found["test/ood/mi"] == pytest.approx(found["test/mi"])


@pytest.mark.e2e
def test_what_peft_would_pass_by_is_refused():
    rows = [{**row, "token_type_ids": row["input_ids"] * 0} for row in texts("sequences")]
    data = DataLoader(rows, batch_size=4)
    with pytest.raises(ValueError, match=r"'token_type_ids' .* pass `network.get_base_model\(\)`"):
        fitted(DeepEnsemble(adapted("sequences"), optimizer=adam), data)
    inner = DeepEnsemble(adapted("sequences").get_base_model(), optimizer=adam)
    fitted(inner, data)
    assert any("lora_A" in name for name in inner.member_stack())


@pytest.mark.e2e
def test_a_doctor_looks_at_tokens_which_are_not_calibrated(tmp_path):
    module, data = ensemble("tokens"), L.LightningDataModule()
    data.train_dataloader = data.val_dataloader = lambda: loader("tokens")
    fitted(module, data, PosteriorDoctor(), default_root_dir=tmp_path)
    with pytest.raises(ValueError, match="Classes at several positions are not calibrated"):
        module.calibrate(data)

"""Copies: nothing that changes later is lost, and nothing that stays is held twice."""

import torch
from torch import nn

from equivtest.observe.snapshot import ModelState, Snapshots, hyperparameters, same_bits


def test_a_copy_keeps_its_value_when_the_tensor_moves_on() -> None:
    value = torch.tensor([1.0])
    kept = Snapshots().tensor("parameter", "w", value)
    value.add_(1.0)
    assert kept.item() == 1.0


def test_an_unchanged_tensor_gives_the_same_copy() -> None:
    snapshots, value = Snapshots(), torch.tensor([1.0])
    first = snapshots.tensor("parameter", "w", value)
    assert snapshots.tensor("parameter", "w", value) is first
    value.add_(1.0)
    assert snapshots.tensor("parameter", "w", value) is not first


def test_names_and_kinds_are_kept_apart() -> None:
    snapshots, value = Snapshots(), torch.tensor([1.0])
    first = snapshots.tensor("parameter", "w", value)
    assert snapshots.tensor("buffer", "w", value) is not first
    assert snapshots.tensor("parameter", "v", value) is not first


def test_bits_differ_by_dtype_shape_and_value() -> None:
    one = torch.ones(2)
    assert same_bits(one, one.clone())
    assert not same_bits(one, one.double())
    assert not same_bits(one, one.reshape(2, 1))
    assert not same_bits(one, torch.tensor([1.0, 2.0]))


def test_a_parameter_without_gradient_has_none_and_a_frozen_one_no_entry() -> None:
    module = nn.Linear(1, 1)
    module.bias.requires_grad_(False)
    assert ModelState(module).gradients() == {"weight": None}


def test_optimizer_state_is_kept_by_name_and_only_for_known_parameters() -> None:
    module, foreign = nn.Linear(1, 1, bias=False), nn.Parameter(torch.ones(1))
    mine = module.weight
    optimizer = torch.optim.SGD([mine, foreign], lr=1.0, momentum=0.9)
    mine.grad, foreign.grad = torch.tensor([[2.0]]), torch.tensor([2.0])
    optimizer.step()
    state = ModelState(module).optimizer_state(optimizer)
    assert list(state) == ["weight"]
    kept = state["weight"]["momentum_buffer"]
    optimizer.state[mine]["momentum_buffer"].zero_()
    assert kept.item() == 2.0


def test_hyperparameters_keep_their_values_of_then() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.5))
    ((names, values),) = hyperparameters(optimizer, {id(parameter): "w"})
    optimizer.param_groups[0]["lr"].mul_(2)
    assert names == ("w",)
    assert float(values["lr"]) == 0.5
    assert "params" not in values


def test_a_parameter_that_no_module_holds_is_a_question_mark() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    assert hyperparameters(optimizer, {})[0][0] == ("?",)


def test_parameters_of_replaced_and_added_modules_are_named() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    state = ModelState(module)
    before = state.parameters()
    module[0].weight = nn.Parameter(torch.full((1, 1), 7.0))
    assert state.parameters()["0.weight"].item() == 7.0
    module[1] = nn.Linear(1, 1, bias=False)
    assert list(state.parameters()) == ["0.weight", "0.bias", "1.weight"]
    module[1].register_parameter("gain", nn.Parameter(torch.ones(())))
    module.add_module("head", nn.Linear(1, 1, bias=False))
    assert list(state.parameters()) == [*list(before)[:3], "1.gain", "head.weight"]


def test_a_functional_call_does_not_stand_in_for_the_parameters() -> None:
    module = nn.Linear(1, 1)
    state, seen = ModelState(module), []
    module.register_forward_hook(lambda *_: seen.append(state.parameters()))
    torch.func.functional_call(module, {"weight": torch.zeros(1, 1)}, torch.ones(1, 1))
    assert torch.equal(seen[0]["weight"], module.weight)
    assert torch.equal(state.parameters()["weight"], module.weight)

"""A parameter's matrices and optimizer: rules in order, defaults by name and shape, errors."""

import pytest
import torch

from titan_muon.assignment.roles import ParameterInfo
from titan_muon.assignment.rules import Assignment, assign_parameters
from titan_muon.options import Split
from titan_muon.plan.terms.types import Interval, Layout, MatrixRows, Mesh, Replicate
from titan_muon.tensors.matrices import check_splits, planned, stack_of
from titan_muon.titan.recipe.sections import Rule

# Names and shapes of TorchTitan's models.
MODEL = {
    "tok_embeddings.weight": (512, 64),
    "layers.0.attention.qkv_linear.wq.weight": (64, 64),
    "layers.0.attention.wo.weight": (64, 64),
    "layers.0.attention.q_norm.weight": (16,),
    "layers.0.attention_norm.weight": (64,),
    "layers.0.feed_forward.w1.weight": (128, 64),
    "layers.1.moe.router.gate.weight": (8, 64),
    "layers.1.moe.routed_experts.inner_experts.w1_EFD": (8, 32, 64),
    "layers.1.moe.shared_experts.w1.weight": (32, 64),
    "norm.weight": (64,),
    "lm_head.weight": (512, 64),
}

SEEN = {name: ParameterInfo(shape) for name, shape in MODEL.items()}


def rule(match: str, optimizer: str) -> Rule:
    return Rule(match=match, optimizer=optimizer)


def assigned(rules: list[Rule], defaults: bool = True, **options: bool) -> dict[str, Assignment]:
    assignments = assign_parameters(SEEN, rules, "adamw" if defaults else None, **options)
    assert [assignment.fqn for assignment in assignments] == list(MODEL), "in the order of the parameters"
    assert all(assignment.shape == MODEL[assignment.fqn] for assignment in assignments)
    return {assignment.fqn: assignment for assignment in assignments}


@pytest.mark.parametrize(
    ("fqn", "optimizer", "reason"),
    [
        ("tok_embeddings.weight", "adamw", "embedding"),
        ("lm_head.weight", "adamw", "output head"),
        ("layers.0.attention.qkv_linear.wq.weight", "muon", "hidden matrix"),
        ("layers.0.attention.wo.weight", "muon", "hidden matrix"),
        ("layers.0.feed_forward.w1.weight", "muon", "hidden matrix"),
        ("layers.1.moe.shared_experts.w1.weight", "muon", "hidden matrix"),
        ("layers.1.moe.routed_experts.inner_experts.w1_EFD", "muon", "stack of expert matrices"),
        ("layers.1.moe.router.gate.weight", "adamw", "router of a mixture of experts"),
        ("layers.0.attention.q_norm.weight", "adamw", "vector"),
        ("layers.0.attention_norm.weight", "adamw", "vector"),
        ("norm.weight", "adamw", "vector"),
    ],
)
def test_defaults_by_name_and_shape(fqn: str, optimizer: str, reason: str) -> None:
    assignment = assigned([])[fqn]
    assert assignment.optimizer == optimizer
    assert assignment.reason.startswith(reason)
    assert assignment.rule is None


@pytest.mark.parametrize(
    ("fqn", "shape", "reason"),
    [
        ("patch.weight", (32, 3, 4, 4), "4D and not a stack of experts"),
        ("mixer.conv1d.weight", (64, 1, 4), "3D and not a stack of experts"),
        ("scale", (), "vector"),
        ("output.weight", (512, 64), "output head"),
    ],
)
def test_adamw_gets_every_parameter_except_hidden_matrices(fqn: str, shape: tuple[int, ...], reason: str) -> None:
    (assignment,) = assign_parameters({fqn: ParameterInfo(shape)}, [])
    assert assignment.optimizer == "adamw"
    assert assignment.reason.startswith(reason)


def test_the_recipe_selects_the_optimizer_of_routers() -> None:
    assignments = assign_parameters(SEEN, [], "muon")
    assert ("layers.1.moe.router.gate.weight", "muon") in [(a.fqn, a.optimizer) for a in assignments]


def test_the_first_matching_rule_wins() -> None:
    rules = [rule("*.wo.weight", "adamw"), rule("layers.0.attention.*", "muon")]
    assignments = assigned(rules)
    wo = assignments["layers.0.attention.wo.weight"]
    assert (wo.optimizer, wo.rule) == ("adamw", 0)
    assert wo.reason == "optimizer.rule[0] '*.wo.weight'"
    assert assignments["layers.0.attention.qkv_linear.wq.weight"].rule == 1
    assert assignments["layers.0.feed_forward.w1.weight"].rule is None


def test_rules_override_defaults() -> None:
    tokens = assigned([rule("tok_embeddings.*", "muon")])["tok_embeddings.weight"]
    assert (tokens.optimizer, tokens.reason, tokens.rule) == ("muon", "optimizer.rule[0] 'tok_embeddings.*'", 0)


@pytest.mark.parametrize("pattern", ["layers.*.wz.weight", "WO", "*.wo.weight "])
def test_a_rule_without_a_match_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"rules\[0\]: .* takes no parameter.*remove it"):
        assigned([rule(pattern, "adamw")])


def test_an_error_names_a_rule_shadowed_by_an_earlier_rule() -> None:
    with pytest.raises(ValueError, match=r"rules\[1\]: '\*\.wo\.weight' takes no parameter.*move it up"):
        assigned([rule("layers.*", "adamw"), rule("*.wo.weight", "muon")])


def test_a_pipeline_stage_accepts_a_rule_without_a_match() -> None:
    assert assigned([rule("layers.7.*", "adamw")], all_rules=False)["norm.weight"].optimizer == "adamw"


def test_without_defaults_every_parameter_needs_a_rule() -> None:
    with pytest.raises(ValueError, match=r"no rule matches norm\.weight, lm_head\.weight \(2 parameters\).*defaults"):
        assigned([rule("layers.*", "muon"), rule("tok*", "adamw")], defaults=False)


def test_many_open_parameters_are_named_in_part() -> None:
    with pytest.raises(ValueError, match=r"\.\.\. \(10 parameters\)"):
        assigned([rule("norm.weight", "adamw")], defaults=False)


def test_without_defaults_only_rules_decide() -> None:
    assignments = assigned([rule("*", "adamw")], defaults=False)
    assert {assignment.optimizer for assignment in assignments.values()} == {"adamw"}


def rows(*bounds: tuple[int, int]) -> tuple[Interval, ...]:
    return tuple(Interval(start, stop) for start, stop in bounds)


def blocks_of(shape: tuple[int, ...], *splits: Split) -> list[tuple[Interval, ...]]:
    return [
        tuple(Interval(i, i + 1) for start, stop in block.rows for i in range(start, stop, block.row_step))
        if block.row_step > 1
        else block.rows
        for block in stack_of("layers.0.w", shape, splits).matrices
    ]


def heads(match: str, height: int) -> Split:
    return Split(match=match, dims="(h f) d -> h | f d", lengths={"f": height})


def pattern(parts: tuple[int, ...], stack: str = "", *, joined: bool = False) -> Split:
    """Parts repeated down each matrix of a stack; with `joined`, parts at the same place are one matrix."""
    matrices = "p | (r h) d" if joined else "r p | h d"
    return Split(match="*", dims=f"{stack} (r p h) d -> {stack} {matrices}", lengths={"p": parts, "h": 1})


def test_a_matrix_is_a_single_block() -> None:
    assert blocks_of((6, 4)) == [rows((0, 6))]
    assert stack_of("w", (6, 4)).row_dims == 1


def test_every_expert_is_a_block() -> None:
    assert blocks_of((3, 2, 5)) == [rows((0, 2)), rows((2, 4)), rows((4, 6))]
    assert stack_of("w", (3, 2, 5)).row_dims == 2


@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 2, 2), (0, 4), (4, 0), (0, 2, 2)])
def test_non_matrix_parameters_are_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.w: Muon takes matrices .*give it to another optimizer"):
        stack_of("layers.0.w", shape)


def test_heads_are_rows_of_equal_number() -> None:
    assert blocks_of((6, 4), heads("*.w", 2)) == [rows((0, 2)), rows((2, 4)), rows((4, 6))]


def test_q_k_and_v_fused_head_by_head() -> None:
    """Two groups of 2 + 1 + 1 heads: q, k and v of each group apart, or joined over the groups."""
    parts = [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7), (7, 8)]
    assert blocks_of((8, 4), pattern((2, 1, 1))) == [rows(part) for part in parts]
    assert blocks_of((8, 4), pattern((2, 1, 1), joined=True)) == [
        rows((0, 2), (4, 6)),
        rows((2, 3), (6, 7)),
        rows((3, 4), (7, 8)),
    ]


def test_every_expert_is_split_separately() -> None:
    """Gate and up fused in each of two experts of 6 rows."""
    assert blocks_of((2, 6, 4), pattern((3, 3), "e")) == [rows(p) for p in ((0, 3), (3, 6), (6, 9), (9, 12))]
    joined = blocks_of((2, 4, 4), pattern((1, 1), "e", joined=True))
    assert joined == [rows((0, 1), (2, 3)), rows((1, 2), (3, 4)), rows((4, 5), (6, 7)), rows((5, 6), (7, 8))]


def test_every_split_puts_every_row_into_exactly_a_single_block() -> None:
    for shape, stack in (((12, 4), ""), ((3, 12, 4), "e")):
        for joined in (False, True):
            blocks = blocks_of(shape, pattern((3, 2, 1), stack, joined=joined))
            every = sorted(i for block in blocks for start, stop in block for i in range(start, stop))
            assert every == list(range(12 if len(shape) == 2 else 36))


def test_the_split_selects_the_matrices_of_a_convolution() -> None:
    stack = stack_of("patch.weight", (32, 3, 4, 4), [Split(match="patch.*", dims="o i h w -> | o (i h w)")])
    assert (stack.row_dims, [block.rows for block in stack.matrices]) == (1, [rows((0, 32))])
    assert stack_of("w", (2, 3, 4), [Split(match="w", dims="o i k -> | o (i k)")]).matrices[0].rows == rows((0, 2))


def test_the_first_matching_split_wins() -> None:
    assert blocks_of((6, 4), heads("other", 1), heads("*.w", 3), heads("*", 2)) == [rows((0, 3)), rows((3, 6))]


@pytest.mark.parametrize("parts", [(4,), (5, 2), (0,), (-1,), (6, 6), (7,), (3, -1)])
def test_parts_with_a_wrong_sum_of_rows_are_refused(parts: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"layers\.0\.w: muon\.split: dims = .*(does not fill 6|a whole number from 1)"
    ):
        blocks_of((6, 4), pattern(parts))


def test_the_error_names_a_split_without_a_match() -> None:
    check_splits(["layers.0.w"], [heads("*.w", 1)])
    with pytest.raises(ValueError, match=r"muon\.split: '\*\.v' matches no Muon parameter"):
        check_splits(["layers.0.w"], [heads("*.w", 1), heads("*.v", 1)])


def test_a_plain_tensor_is_planned_as_whole_on_every_rank() -> None:
    parameter = planned("layers.3.mlp.w", torch.zeros(4, 2))
    assert (parameter.fqn, parameter.layer, parameter.plain) == ("layers.3.mlp.w", "layers.3", True)
    assert parameter.layout == Layout((4, 2), Mesh((1,), (0,)), (Replicate(),))
    assert isinstance(parameter.stack.matrices[0], MatrixRows)

"""Where layers lie in the arrays that ranks hold."""

import numpy as np
import pytest

from mxjax.pipeline.layout import make_layout
from mxjax.pipeline.stacks import Stacks, in_order


def stacks(kinds, *layout, **options):
    return Stacks(make_layout(sum(kinds.values()), *layout, **options), kinds)


def test_even_stages_of_one_kind_are_in_the_order_of_the_model():
    found = stacks({"layers": 8}, 4)
    assert found.stage_layers == ((2,),) * 4
    assert found.bases == {"layers": [0, 2]}
    assert found.places("layers").tolist() == list(range(8))
    assert in_order(found.places("layers"))


def test_each_chunk_has_as_many_places_as_its_largest_stage_needs():
    """Interleaved, 2 ranks x 2: layers 0 | 1 2 | 3 4 5 | 6. Chunk 0 needs 2 places, chunk 1 needs 3."""
    found = stacks({"layers": 7}, 2, 2, layout="Et|tt|ttt|tL")
    assert found.bases == {"layers": [0, 2, 5]}
    assert found.places("layers").tolist() == [0, -1, 3, 4, 5, 1, 2, 6, -1, -1]
    assert not in_order(found.places("layers"))


def test_kinds_are_counted_on_their_own():
    """V of 2 ranks, stages 0 | 1 2 | 3 | 4 5; the first two layers are dense, the rest experts."""
    found = stacks({"dense": 2, "experts": 4}, 2, 2, "v", layout="Et|tt|t|ttL")
    assert found.stage_layers == ((1, 0), (1, 1), (0, 1), (0, 2))
    assert found.bases == {"dense": [0, 1, 1], "experts": [0, 1, 3]}
    # Rank 0 has stages 0 and 3, rank 1 has stages 1 and 2.
    assert found.places("dense").tolist() == [0, 1]
    assert found.places("experts").tolist() == [-1, 2, 3, 0, 1, -1]


@pytest.mark.parametrize("num_layers", [1, 3, 13, 61])
@pytest.mark.parametrize(("V", "placement"), [(1, "loop"), (3, "loop"), (2, "v")])
def test_every_layer_has_one_place(num_layers, V, placement):
    """With places left empty, and a stage may have no layer at all."""
    num_dense = num_layers // 3
    kinds = {"dense": num_dense, "experts": num_layers - num_dense}
    kinds = {kind: n for kind, n in kinds.items() if n}
    P = 2
    while V * P <= 8:
        if num_layers > V * P:
            found = stacks(kinds, P, V, placement, empty_layers="auto")
            for k, (kind, number) in enumerate(kinds.items()):
                places = found.places(kind)
                assert sorted(places[places >= 0]) == list(range(number))
                first = num_dense if kind == "experts" else 0
                of_rank = places.reshape(P, -1)
                for stage, counts in enumerate(found.stage_layers):
                    rank, chunk = found.layout.rank_of(stage), found.layout.chunk_of(stage)
                    base, end = found.bases[kind][chunk : chunk + 2]
                    here = of_rank[rank, base:end]
                    numbers = [n - first for n in found.layout.layers[stage]]
                    mine = [n for n in numbers if 0 <= n < number]
                    assert counts[k] == len(mine)
                    assert here.tolist() == mine + [-1] * (end - base - len(mine))
        P *= 2


def test_in_order_wants_all_of_them():
    assert in_order(np.arange(4))
    assert not in_order(np.array([0, 1, -1]))
    assert not in_order(np.array([1, 0]))


def test_kinds_of_one_group_share_its_places():
    """Layers that only differ in their recompute policy have weights in one stack: a second kind
    takes no places of its own."""
    layout = make_layout(6, 2, layout="Ettt|tttL")
    kinds = {"dense": 1, "experts.0": 3, "experts.1": 2}
    found = Stacks(layout, kinds, {"experts.0": "experts", "experts.1": "experts"})
    assert found.groups == {"dense": ["dense"], "experts": ["experts.0", "experts.1"]}
    assert found.bases == {"dense": [0, 1], "experts": [0, 3]}
    assert found.places("experts").tolist() == [0, 1, -1, 2, 3, 4]
    assert found.stage_layers == ((1, 2, 0), (0, 1, 2))
    assert [found.before("experts.1", counts) for counts in found.stage_layers] == [2, 1]
    assert found.group("experts") == "experts"

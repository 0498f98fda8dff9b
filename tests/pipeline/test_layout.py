"""Where layers go, for each way to say it, and what is refused."""

import pytest

from mxjax.pipeline.layout import LayoutError, count_stages, make_layout
from mxjax.pipeline.schedules import make_schedule


def sizes(layout):
    return [len(layers) for layers in layout.layers]


def test_an_even_split_numbers_layers_in_the_order_of_the_model():
    layout = make_layout(12, 2, 3)
    assert layout.layers == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    assert [layout.stages_of(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [layout.rank_of(stage) for stage in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [layout.chunk_of(stage) for stage in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [stage for stage in range(6) if layout.has_embedding(stage)] == [0]
    assert [stage for stage in range(6) if layout.has_loss(stage)] == [5]
    assert layout.num_layers == 12
    assert layout.empty_layers == (0,) * 6


@pytest.mark.parametrize(("name", "placement"), [("interleaved", "loop"), ("dualpipev", "v")])
def test_stages_lie_where_the_schedule_has_them(name, placement):
    layout = make_layout(16, 4, 2, placement)
    schedule = make_schedule(name, 4, 8)
    assert layout.stage_to_rank == schedule.stage_to_rank
    assert [layout.chunk_of(s) for s in range(8)] == [schedule.chunk_of(s) for s in range(8)]


def test_megatrons_example_string_puts_layers_where_megatron_does():
    text = "Et*3|(tt|)*29,m|L"
    layout = make_layout(61, 16, 2, layout=text, mtp_num_layers=1)
    assert count_stages(text) == 32
    assert sizes(layout) == [3] + [2] * 29 + [0, 0]
    # The second of its two chunks of rank 14 has the extra prediction, that of rank 15 the loss.
    assert layout.mtp_layers[30] == (0,)
    assert sum(map(len, layout.mtp_layers)) == 1
    assert (layout.rank_of(30), layout.rank_of(31)) == (14, 15)
    assert layout.has_loss(31)
    assert layout.layers[16] == (33, 34)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Etttt|ttttL", [4, 4]),
        ("E|(tt|)*2,(t|)*4,tmL", [0, 2, 2, 1, 1, 1, 1, 1]),
        ("Et*4 | t*4 L", [4, 4]),
        ("E|t*8|L", [0, 8, 0]),
        ("E((t|)*2tt|)*2L", [1, 1, 2, 1, 1, 2, 0]),
    ],
)
def test_layout_strings_repeat_letters_and_groups(text, stages):
    num_layers, mtp = sum(stages), text.count("m")
    layout = make_layout(num_layers, len(stages), layout=text, mtp_num_layers=mtp)
    assert sizes(layout) == stages


def test_61_layers_get_three_empty_ones_beside_embedding_and_loss():
    layout = make_layout(61, 8, 2, empty_layers="auto")
    assert sizes(layout) == [3] + [4] * 14 + [2]
    assert layout.empty_layers == (1, *[0] * 14, 2)
    assert layout.num_layers == 61
    assert layout == make_layout(61, 8, 2, empty_layers=[0, 62, 63])


def test_15_layers_on_three_ranks_with_two_chunks():
    layout = make_layout(15, 3, 2, empty_layers="auto")
    assert sizes(layout) == [2, 3, 3, 3, 3, 1]
    assert layout.empty_layers == (1, 0, 0, 0, 0, 2)


def test_many_empty_layers_are_spread_from_both_ends_inwards():
    assert make_layout(57, 8, 2, empty_layers="auto").empty_layers == (1, 1, 1, *[0] * 10, 1, 1, 2)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_auto_fills_every_stage_to_the_same_size(num_stages, embedding, loss):
    for num_layers in range(max(1, num_stages - 2), 26):  # each rank has something to do
        layout = make_layout(
            num_layers,
            num_stages,
            account_for_embedding_in_pipeline_split=embedding,
            account_for_loss_in_pipeline_split=loss,
            empty_layers="auto",
        )
        assert [n for layers in layout.layers for n in layers] == list(range(num_layers))
        slots = [a + b for a, b in zip(sizes(layout), layout.empty_layers, strict=True)]
        slots[0] += embedding
        slots[-1] += loss
        assert len(set(slots)) == 1
        assert sum(layout.empty_layers) < num_stages


def test_given_places_are_counted_in_the_row_of_layers_and_empty_places():
    layout = make_layout(6, 4, empty_layers=[1, 4])
    assert layout.layers == ((0,), (1, 2), (3,), (4, 5))
    assert layout.empty_layers == (1, 0, 1, 0)


def test_embedding_and_loss_take_the_place_of_a_layer():
    layout = make_layout(
        62,
        8,
        2,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert sizes(layout) == [3] + [4] * 14 + [3]


def test_counts_are_those_of_a_rank_over_all_of_its_chunks():
    counts = {"num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 2}
    assert sizes(make_layout(18, 4, **counts)) == [4, 6, 6, 2]
    assert sizes(make_layout(18, 4, 2, **counts)) == [2, 3, 3, 1] * 2
    assert sizes(make_layout(18, 4, 2, "v", **counts)) == [2, 3, 3, 1, 1, 3, 3, 2]
    assert sizes(make_layout(6, 2, **counts)) == [4, 2]
    assert sizes(make_layout(10, 4, num_layers_in_first_pipeline_stage=1)) == [1, 3, 3, 3]


def test_the_description_names_what_is_on_each_rank():
    layout = make_layout(7, 2, 2, "v", mtp_num_layers=1, empty_layers="auto")
    assert layout.describe() == (
        "rank 0: embedding, layers 0-1 | layer 6, 1 empty, mtp 0, loss\n"
        "rank 1: layers 2-3 | layers 4-5"
    )
    in_a_v = make_layout(4, 2, 2, "v", layout="Ett||tt|L")
    assert in_a_v.describe().splitlines()[1] == "rank 1: nothing | layers 2-3"


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (
            {"num_layers": 61, "num_ranks": 8, "num_chunks": 2},
            "num_layers",
            "61 layers, but 8 ranks x 2 = 16 stages hold 48 or 64; set empty_layers to auto (3 empty)",
        ),
        (
            {"num_layers": 61, "num_ranks": 8, "account_for_loss_in_pipeline_split": True},
            "num_layers",
            "61 layers + the loss = 62, but 8 ranks x 1 = 8 stages hold 56 or 64",
        ),
        (
            {"num_layers": 61, "num_ranks": 8, "empty_layers": [0]},
            "empty_layers",
            "61 layers + 1 empty = 62, but 8 ranks x 1 = 8 stages hold 56 or 64; set empty_layers to "
            "3 places",
        ),
        (
            {"num_layers": 6, "num_ranks": 4, "empty_layers": [1, 8]},
            "empty_layers",
            "there is no place 8; there are 0 to 7",
        ),
        ({"num_layers": 6, "num_ranks": 4, "empty_layers": [1, 1]}, "empty_layers", "twice"),
        (
            {"num_layers": 8, "num_ranks": 4, "layout": "Ett|ttt|tttL"},
            "layout",
            "has 3 stages, but 4 ranks x 1 = 4",
        ),
        (
            {"num_layers": 9, "num_ranks": 3, "layout": "Ett|ttt|tttL"},
            "layout",
            "has 8 times t, but num_layers is 9",
        ),
        (
            {"num_layers": 4, "num_ranks": 2, "layout": "Ett|ttmL"},
            "layout",
            "has 1 times m, but mtp_num_layers is 0",
        ),
        (
            {"num_layers": 4, "num_ranks": 2, "layout": "tt|tt"},
            "layout",
            "must begin with its only E",
        ),
        (
            {"num_layers": 4, "num_ranks": 2, "layout": "Ettm|ttL", "mtp_num_layers": 1},
            "layout",
            "a t after an m",
        ),
        (
            {"num_layers": 2, "num_ranks": 2, "layout": "Ettm|mL", "mtp_num_layers": 2},
            "layout",
            "m on several stages",
        ),
        (
            {"num_layers": 4, "num_ranks": 2, "layout": "E(tt|ttL"},
            "layout",
            "does not close a bracket",
        ),
        ({"num_layers": 4, "num_ranks": 2, "layout": "Ett|xxL"}, "layout", "'x' in 'Ett|xxL'"),
        ({"num_layers": 4, "num_ranks": 2, "layout": "*2Ett|ttL"}, "layout", "'*2' in"),
        (
            {"num_layers": 4, "num_ranks": 2, "layout": "Ett|ttL", "empty_layers": "auto"},
            "layout",
            "remove empty_layers",
        ),
        (
            {
                "num_layers": 20,
                "num_ranks": 4,
                "num_layers_in_first_pipeline_stage": 3,
                "num_layers_in_last_pipeline_stage": 4,
            },
            "num_layers_in_first_pipeline_stage",
            "3 + 4 = 7 layers on the given ranks leave 13 of 20 for the other 2",
        ),
        (
            {
                "num_layers": 20,
                "num_ranks": 2,
                "num_chunks": 2,
                "num_layers_in_last_pipeline_stage": 5,
            },
            "num_layers_in_last_pipeline_stage",
            "rank 0 has 15 layers, which must divide over its 2 stages",
        ),
        (
            {"num_layers": 20, "num_ranks": 1, "num_layers_in_first_pipeline_stage": 20},
            "num_layers_in_first_pipeline_stage",
            "one rank has all layers",
        ),
        (
            {
                "num_layers": 20,
                "num_ranks": 4,
                "num_layers_in_first_pipeline_stage": 2,
                "account_for_loss_in_pipeline_split": True,
            },
            "num_layers_in_first_pipeline_stage",
            "cannot be combined with account_for_embedding_in_pipeline_split / account_for_loss",
        ),
        (
            {"num_layers": 4, "num_ranks": 10**22},
            "num_ranks",
            "only 4 layers, the embedding and the loss can be spread",
        ),
        (
            {"num_layers": 4, "num_ranks": 2, "num_chunks": 10**6, "empty_layers": "auto"},
            "num_chunks",
            "only 4 layers, the embedding and the loss can be spread",
        ),
        ({"num_layers": 4, "num_ranks": 2, "layout": " "}, "layout", "is empty"),
        (
            {"num_layers": 4, "num_ranks": 2, "layout": "E(((t*1000)*1000)*1000)*1000|L"},
            "layout",
            "is longer than 100,000 letters",
        ),
        (
            {"num_layers": 12, "num_ranks": 4, "num_chunks": 3, "placement": "v"},
            "num_chunks",
            "stages in a V are two a rank",
        ),
    ],
)
def test_layers_that_do_not_add_up_are_refused_with_both_sums(arguments, key, message):
    with pytest.raises(LayoutError) as error:
        make_layout(**arguments)
    assert error.value.key == key
    assert message in error.value.message


@pytest.mark.parametrize(
    ("arguments", "key", "rank"),
    [
        ({"num_layers": 3, "num_ranks": 3, "layout": "Ett||tL"}, "layout", 1),
        (
            {"num_layers": 2, "num_ranks": 3, "num_layers_in_last_pipeline_stage": 2},
            "num_layers_in_last_pipeline_stage",
            1,
        ),
        ({"num_layers": 3, "num_ranks": 4, "empty_layers": [1]}, "empty_layers", 1),
    ],
)
def test_a_rank_with_nothing_to_compute_is_refused(arguments, key, rank):
    with pytest.raises(LayoutError, match=f"leaves rank {rank} with nothing to compute") as error:
        make_layout(**arguments)
    assert error.value.key == key


def test_a_rank_may_have_only_the_embedding_or_only_the_loss():
    assert make_layout(4, 4, layout="E|tt|tt|L").layers == ((), (0, 1), (2, 3), ())
    in_a_v = make_layout(4, 2, 2, "v", layout="Ett||tt|L")
    assert in_a_v.layers == ((0, 1), (), (2, 3), ())

"""What a trace derives, on a canvas small enough to count by hand; and how it is kept."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from dglab_utils.errors import LabError
from dglab_utils.sampling.trace import LAYOUT, CanvasTrace


@pytest.fixture
def trace() -> CanvasTrace:
    """Four steps of four positions: 0 and 1 accepted at once, 0 un-accepted once, 2 accepted last, 3 never."""
    accepted = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=bool)
    argmax = np.array([[5, 6, 7, 8], [5, 6, 1, 8], [5, 9, 1, 8], [5, 6, 2, 8]], dtype=np.int32)
    steps = np.arange(4, dtype=np.float32)
    return CanvasTrace(
        current=argmax + 10,
        argmax=argmax,
        sampled=argmax + 20,
        entropy=np.arange(16, dtype=np.float32).reshape(4, 4),
        accepted=accepted,
        temperature=0.8 - steps / 10,
        mean_entropy=steps,
        stable=np.array([False, False, False, True]),
        confident=np.array([False, False, True, True]),
        output=np.array([5, 6, 0, 0], dtype=np.int32),
        prompt=np.array([3, 4], dtype=np.int32),
        settings={"pad_token_id": 0, "eos_token_id": [6], "vocab_size": 50, "stability_threshold": 1},
        row=1,
        canvas=2,
        stopped=True,
        seed=7,
        model="by hand",
        dtype="float32",
        device="cpu",
    )


def test_derived_quantities(trace):
    assert (trace.steps, trace.canvas_length) == (4, 4)
    assert trace.commits_per_step.tolist() == [2, 1, 2, 3]
    assert trace.commits_per_forward == 2.0
    assert trace.official_tokens_per_forward == 0.5  # two tokens that are no padding, four forwards
    # Of the 12 pairs of steps: not/not 5, not/accepted 2, accepted/not 1, accepted/accepted 4.
    assert trace.accept_transitions.tolist() == [[5, 2], [1, 4]]
    assert trace.unaccepted_share == 0.2
    assert trace.argmax_changed_share == 4 / 12
    assert trace.first_accept.tolist() == [0, 0, 3, -1]
    assert trace.final_change.tolist() == [0, 3, 3, 0]
    assert trace.entropy_at_acceptance.tolist() == [0.0, 1.0, 14.0]
    # Positions 0, 1, 2 first accepted at 0, 0, 3: two concordant pairs, one tie: 2 / sqrt(3 * 2).
    assert trace.order_against_position == pytest.approx(2 / math.sqrt(6))


def test_no_padding_counts_the_whole_canvas(trace):
    assert replace(trace, settings={"pad_token_id": None}).official_tokens_per_forward == 1.0
    assert math.isnan(replace(trace, ended_before=True).official_tokens_per_forward)


def test_kl_to_final_needs_logits(trace):
    with pytest.raises(LabError, match="keep_logits=True"):
        _ = trace.kl_to_final
    logits = np.zeros((4, 4, 2), dtype=np.float32)
    logits[:3, :, 0] = math.log(3)  # 3/4 against 1/4, at the end 1/2 against 1/2
    kl = replace(trace, logits=logits).kl_to_final
    assert kl[-1].tolist() == [0] * 4
    assert kl[0] == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_round_trip(trace, tmp_path):
    path = trace.save(tmp_path / "run.npz")
    again = CanvasTrace.load(path)
    assert again.digest() == trace.digest()
    assert again.settings == trace.settings
    assert (again.row, again.canvas, again.stopped, again.seed, again.model) == (1, 2, True, 7, "by hand")
    assert again.logits is None
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]


def test_equal_traces_have_equal_files(trace, tmp_path):
    first, second = (trace.save(tmp_path / name).read_bytes() for name in ("a.npz", "b.npz"))
    assert first == second


def test_the_digest_sees_every_array(trace):
    for name in ("current", "sampled", "accepted", "entropy", "output"):
        changed = getattr(trace, name).copy()
        changed.flat[-1] = ~changed.flat[-1] if changed.dtype == bool else changed.flat[-1] + 1
        assert replace(trace, **{name: changed}).digest() != trace.digest(), name


def test_bad_files(trace, tmp_path):
    path = trace.save(tmp_path / "run.npz")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:10], b"", b"not a trace"):
        path.write_bytes(damaged)
        with pytest.raises(LabError, match=r"run\.npz: not a readable trace .* record it again"):
            CanvasTrace.load(path)
    np.savez(path, meta=np.array('{"schema": 99}'))
    with pytest.raises(LabError, match=r"run\.npz: trace schema 99, this version reads 1"):
        CanvasTrace.load(path)
    np.savez(path, numbers=np.arange(3))
    with pytest.raises(LabError, match="not a readable trace"):
        CanvasTrace.load(path)
    with pytest.raises(LabError, match="no such trace"):
        CanvasTrace.load(tmp_path / "absent.npz")
    with pytest.raises(LabError, match=r"saved as \.npz"):
        trace.save(tmp_path / "run.json")


@pytest.mark.parametrize("compress", [False, True])
def test_any_damage_is_one_line_or_harmless(trace, tmp_path, compress):
    """Random bytes flipped, and the file cut at random: nothing but a LabError comes out."""
    path = replace(trace, logits=np.zeros((4, 4, 2), dtype=np.float32)).save(tmp_path / "run.npz")
    if compress:  # not what save writes, but numpy reads it, and zlib then has its own ways to fail
        with np.load(path) as archive:
            np.savez_compressed(path, **archive)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for attempt in range(400):
        damaged = bytearray(whole)
        for at in random.integers(len(whole), size=random.integers(1, 9)):
            damaged[at] ^= int(random.integers(1, 256))
        path.write_bytes(damaged[: random.integers(len(whole))] if attempt % 4 == 0 else damaged)
        try:
            assert CanvasTrace.load(path).steps == 4
        except LabError as error:
            refused += 1
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
            assert "record it again" in str(error)
    assert refused > 200


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"argmax": np.zeros((3, 4), np.int32)}, "argmax has S = 3, other arrays 4"),
        ({"output": np.zeros(5, np.int32)}, "output has L = 5, other arrays 4"),
        ({"temperature": np.zeros((4, 1), np.float32)}, r"temperature is not \[S\]"),
        ({"prompt": np.zeros((1, 2), np.int32)}, r"prompt is not \[P\]"),
        ({"accepted": np.zeros((4, 4), np.float32)}, r"accepted is not \[S, L\] of kind b"),
        ({"logits": np.zeros((4, 4), np.float32)}, r"logits is not \[S, L, V\]"),
        ({"logits": np.zeros((4, 3, 9), np.float32)}, "logits has L = 3, other arrays 4"),
        ({"entropy": "high"}, r"entropy is not \[S, L\]"),
        ({"settings": [1]}, "settings is not a dictionary"),
    ],
)
def test_arrays_that_do_not_fit_are_named(trace, tmp_path, changes, told):
    path = replace(trace, **changes).save(tmp_path / "run.npz")
    with pytest.raises(LabError, match=rf"run\.npz: not a readable trace \({told}"):
        CanvasTrace.load(path)


def test_a_trace_without_steps_is_refused(trace, tmp_path):
    rows = {name: getattr(trace, name)[:0] for name, (axes, _) in LAYOUT.items() if axes[0] == "S" and name != "logits"}
    with pytest.raises(LabError, match="no steps"):
        CanvasTrace.load(replace(trace, **rows).save(tmp_path / "run.npz"))


def test_a_failed_save_keeps_what_was_there(trace, tmp_path):
    path = trace.save(tmp_path / "run.npz")
    before = path.read_bytes()
    with pytest.raises(TypeError):
        replace(trace, settings={"not": object()}).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]


def test_the_first_positions_are_a_trace_of_their_own(trace):
    cut = trace.first(2)
    assert (cut.steps, cut.canvas_length, cut.row, cut.canvas) == (4, 2, 1, 2)
    assert cut.accepted.tolist() == [[True, True], [False, True], [True, True], [True, True]]
    assert cut.commits_per_step.tolist() == [2, 1, 2, 2]
    assert cut.entropy.tolist() == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert cut.output.tolist() == [5, 6] and cut.mean_entropy.tolist() == trace.mean_entropy.tolist()
    cut._check()

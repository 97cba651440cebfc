"""Drawing a whole batch at once, as on a GPU, gives what the row-by-row sampler of the CPU gives."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from phloem.kernels.sampling import draw_tokens
from phloem.runtime import SamplingParams
from phloem.runtime.sampler import SamplingRow, _draws, sample

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 1e-9, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([1, 2, 7, 299]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)


@given(st.lists(params, min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_batch_draws_what_its_rows_draw_alone(batch: list[SamplingParams], seed: int) -> None:
    """With `top_k`, both draw from the likeliest down; without, the CPU spares itself the sort."""
    logits = torch.randn((len(batch), 300), generator=torch.Generator().manual_seed(seed)) * 4
    logits[:, 7] = -torch.inf
    rows = [SamplingRow(each, seed, child, position=9) for child, each in enumerate(batch)]
    assert draw_tokens(logits, _draws(rows, logits)).tolist() == sample(logits.clone(), rows)

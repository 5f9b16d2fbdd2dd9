import torch

from tests.paged_attention import Case, make_step
from worker.engine.attention.flashinfer_backend import step_pages, supports


def test_pages_are_the_blocks_of_all_sequences_in_order() -> None:
    meta = make_step(Case(query_lens=(1, 1, 5), seq_lens=(33, 16, 7))).meta
    pages = step_pages(meta)
    assert pages.starts.tolist() == [0, 3, 4, 5]
    assert pages.ids.tolist() == [*meta.block_tables[0, :3].tolist(), meta.block_tables[1, 0], meta.block_tables[2, 0]]
    assert pages.last_lens.tolist() == [1, 16, 7]
    assert {tensor.dtype for tensor in pages} == {torch.int32}
    assert step_pages(meta) is pages


def test_it_is_no_backend_without_cuda() -> None:
    assert not supports([], torch.bfloat16, torch.device("cpu"))

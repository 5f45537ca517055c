"""Newest tokens on the GPU, and captured: as the reference keeps and fills them in."""

import torch

from stagecoach.kernels.newest import cuda, reference


def test_kept_and_filled_in_as_by_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_segments in (1, 5, 256, 300):
        newest_N = torch.zeros(512, dtype=torch.int32)
        rows_B = torch.randperm(512, generator=generator)[:num_segments].to(torch.int32)
        rows_B[::3] = -1
        chosen_B = torch.randint(100_000, (num_segments,), generator=generator, dtype=torch.int32)
        on_gpu = newest_N.cuda()
        cuda.note_newest(on_gpu, rows_B.cuda(), chosen_B.cuda())
        reference.note_newest(newest_N, rows_B, chosen_B)
        assert torch.equal(on_gpu.cpu(), newest_N)
        segment_T = torch.arange(num_segments, dtype=torch.int32)
        token_ids_T = torch.where(rows_B >= 0, -1, 7).to(torch.int32)
        ids = token_ids_T.cuda()
        cuda.fill_in_newest(ids, segment_T.cuda(), rows_B.cuda(), on_gpu)
        reference.fill_in_newest(token_ids_T, segment_T, rows_B, newest_N)
        assert torch.equal(ids.cpu(), token_ids_T)

"""Files of ``torch.save`` and ``torch.distributed.checkpoint``, read and written without torch."""

"""One arithmetic thread: the tests compare bits, and the models are far too small for two."""

import os
import tempfile

_CACHE = tempfile.TemporaryDirectory(prefix="kvrl-tests-", ignore_cleanup_errors=True)
os.environ["HF_DATASETS_CACHE"] = _CACHE.name  # read when datasets is imported; the user's cache stays as it is

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture
def double(monkeypatch):
    """float64 models compute in float64 throughout.

    transformers casts norms, softmax and routers to float32 whatever the model's dtype; that rounding would
    hide small mistakes and is amplified by the layers after it.
    """
    to, to_float, softmax = torch.Tensor.to, torch.Tensor.float, torch.nn.functional.softmax
    float64 = torch.float64

    def keep(self, *args, **kwargs):
        wants = kwargs.get("dtype", args[0] if args else None)
        return self if self.dtype is float64 and wants is torch.float32 else to(self, *args, **kwargs)

    def keep_softmax(x, *args, dtype=None, **kwargs):
        return softmax(x, *args, dtype=None if x.dtype is float64 else dtype, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", keep)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self if self.dtype is float64 else to_float(self))
    monkeypatch.setattr(torch.nn.functional, "softmax", keep_softmax)

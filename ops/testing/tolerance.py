"""One tolerance for all: an error is judged by the rounding that the same computation cannot avoid."""

import torch

# A kernel may order its sums differently from the reference; its error stays within a small multiple.
DEFAULT_FACTOR = 3.0


def rounding_band(exact: torch.Tensor, eager: torch.Tensor, factor: float = DEFAULT_FACTOR) -> float:
    """The largest error allowed: factor x (error of the eager low-precision run + one rounding of the largest value).

    Args:
        exact: the reference's result in float64.
        eager: the reference's result in the dtype under test.
    """
    if exact.numel() == 0:
        return 0.0
    exact = exact.double()
    eager_error = (eager.double() - exact).abs().max().item()
    rounding = torch.finfo(eager.dtype).eps * exact.abs().max().item()
    return factor * (eager_error + rounding)


def assert_within_rounding(
    actual: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, factor: float = DEFAULT_FACTOR, what: str = "result"
) -> None:
    """Raises AssertionError where `actual` is further from `exact` than `rounding_band` allows, or differs in NaN.

    Integer results must be equal.
    """
    assert actual.shape == exact.shape, f"{what}: shape must be {list(exact.shape)}, got {list(actual.shape)}"
    assert actual.dtype == eager.dtype, f"{what}: dtype must be {eager.dtype}, got {actual.dtype}"
    if not actual.dtype.is_floating_point:
        assert torch.equal(actual, eager), f"{what}: must be {eager.tolist()}, got {actual.tolist()}"
        return
    actual, exact = actual.double(), exact.double()
    finite = exact.isfinite()
    same_outside = torch.equal(actual[~finite].nan_to_num(), exact[~finite].nan_to_num())
    assert same_outside and bool(actual[finite].isfinite().all()), (
        f"{what}: NaN and infinity must stand where they should"
    )
    if not finite.any():
        return
    band = rounding_band(exact[finite], eager[finite], factor)
    error = (actual[finite] - exact[finite]).abs().max().item()
    assert error <= band, f"{what}: error {error:.3e} is above the band {band:.3e}"

"""Only kvrl's own lines on the terminal: no bars and no log lines of the libraries that load things."""

from __future__ import annotations

import warnings


def quiet_models() -> None:
    """No bars while weights are read or written, and no lines about a hub that does not answer."""
    import huggingface_hub.utils.logging as hub_logging
    import transformers.utils.logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    # peft asks transformers by a name that is to go: nothing that a user could change
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")


def quiet_datasets() -> None:
    """No bars while rows are read; a file that cannot be read is told by kvrl alone."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)

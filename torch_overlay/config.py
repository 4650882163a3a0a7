"""Options of the overlay, in PyTorch's own configuration system.

    torch_overlay.config.streams = False
    with torch_overlay.config.patch(streams=False): ...

An option is read when a function is compiled; what is compiled already stays as it is. As everywhere in PyTorch's
configuration, an assignment holds in the thread that makes it, and an environment variable changes the default.
"""

import sys
from typing import TYPE_CHECKING

from torch.utils._config_module import Config, install_config_module


# User streams and events go through the compiler. False gives upstream's handling of them back.
streams: bool = Config(default=True, env_name_default="TORCH_OVERLAY_STREAMS")


if TYPE_CHECKING:
    from torch.utils._config_typing import *  # noqa: F403


install_config_module(sys.modules[__name__])

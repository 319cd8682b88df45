"""Every setting: its default, its help, its check, and where its value comes from."""

from counterpoint.config.checks import (
    ConfigError,
    name_file_in_errors,
    parse_host_port,
    require_writable,
)
from counterpoint.config.sections import (
    ClusterConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from counterpoint.config.tree import (
    SECTIONS,
    Config,
    checked_value,
    from_file,
    from_mapping,
    section_of,
)

__all__ = [
    "SECTIONS",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DeviceConfig",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "checked_value",
    "from_file",
    "from_mapping",
    "name_file_in_errors",
    "parse_host_port",
    "require_writable",
    "section_of",
]

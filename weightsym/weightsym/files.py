"""Networks in files: one tensor at a time, or all networks of a folder as one stack."""

from typing import TYPE_CHECKING

from weightsym._lazy import lazy_package

if TYPE_CHECKING:
    from weightsym.networks.files.checkpoints import read_networks
    from weightsym.networks.files.fitting import fit
    from weightsym.networks.files.names import NetworkNames
    from weightsym.networks.files.stored import open_network
    from weightsym.networks.files.writing import write_like
if TYPE_CHECKING:  # for packages that build on this one
    from weightsym.networks.files.checkpoints import (
        FORMATS,
        LabelledNetworks,
        checkpoint_files,
        networks_in,
        read_state,
    )
    from weightsym.networks.files.drafts import draft_of, sync, write_all, write_whole
    from weightsym.networks.files.loading import (
        describe_content,
        json_text,
        load,
        parse_json,
        read_json,
    )
    from weightsym.networks.files.safetensors_format import (
        bytes_of,
        check_types,
        read_file,
        save_tensors,
    )
    from weightsym.networks.files.settings import (
        config_files,
        named_configs,
        read_settings,
        settings_of_text,
    )

lazy_package(__name__)

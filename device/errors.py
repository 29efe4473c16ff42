"""What can go wrong before a device runs: the model, or the device's settings. Each message says what to do."""


class ModelError(Exception):
    """The model that was asked for cannot be served."""


class ModelNotFound(ModelError):
    """No such model here, and none could be fetched under this name: correct the name, or fetch it first."""


class ModelDownloadFailed(ModelError):
    """A download failed or was not what it should be: try again, or give a local folder."""


class ModelUnsupported(ModelError):
    """The model is there, but this server cannot run it: choose another one."""


class DeviceSetupError(Exception):
    """A device setting cannot be met on this machine: change the setting."""

"""Data sets by name, in memory or on disk, and loaders whose batches depend on seed and epoch only."""

from advnorm.data.catalogue import DATASETS, DataSource, list_datasets, load
from advnorm.data.cifar import cifar10
from advnorm.data.corrupt import corrupt, list_corruptions
from advnorm.data.digits import digits
from advnorm.data.features import FeatureFolder, add_split
from advnorm.data.files import MissingFiles
from advnorm.data.loader import AUGMENTS, Batch, Loader, ResidentLoader, WorkerLoader, make_loader
from advnorm.data.sets import FolderData, ImageData, split_held_out

__all__ = [
    "AUGMENTS",
    "DATASETS",
    "Batch",
    "DataSource",
    "FeatureFolder",
    "FolderData",
    "ImageData",
    "Loader",
    "MissingFiles",
    "ResidentLoader",
    "WorkerLoader",
    "add_split",
    "cifar10",
    "corrupt",
    "digits",
    "list_corruptions",
    "list_datasets",
    "load",
    "make_loader",
    "split_held_out",
]

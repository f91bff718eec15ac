"""Data sets by name, in memory or on disk, and loaders whose batches depend on seed and epoch only."""

from advnorm.data import arrays, cifar, cifar10c, image_folders, svhn, synthetic  # noqa: F401  they register data sets
from advnorm.data.arrays import as_image_data
from advnorm.data.cifar import cifar10, cifar100
from advnorm.data.corruptions import corrupt, list_corruptions
from advnorm.data.digits import digits
from advnorm.data.feature_sets import FeatureFolder, add_split
from advnorm.data.image_data import FolderData, ImageData, balanced_subset, split_held_out
from advnorm.data.loader import Batch, Loader, make_loader
from advnorm.data.registry import (
    DATASETS,
    DataSource,
    data_problems,
    list_datasets,
    load,
    register_dataset,
    resolve_source,
)

__all__ = [
    "DATASETS",
    "Batch",
    "DataSource",
    "FeatureFolder",
    "FolderData",
    "ImageData",
    "Loader",
    "add_split",
    "as_image_data",
    "balanced_subset",
    "cifar10",
    "cifar100",
    "corrupt",
    "data_problems",
    "digits",
    "list_corruptions",
    "list_datasets",
    "load",
    "make_loader",
    "register_dataset",
    "resolve_source",
    "split_held_out",
]

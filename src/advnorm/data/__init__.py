"""Data sets by name, in memory or on disk, and loaders whose batches depend on seed and epoch only."""

from advnorm.data.cifar import cifar10, cifar100
from advnorm.data.cifar10c import read_cifar10c
from advnorm.data.corruptions import corrupt, list_corruptions
from advnorm.data.digits import digits
from advnorm.data.feature_sets import FeatureFolder, add_split
from advnorm.data.image_data import FolderData, ImageData, split_held_out
from advnorm.data.image_folders import read_imagefolder
from advnorm.data.loader import AUGMENTS, Batch, Loader, ResidentLoader, WorkerLoader, make_loader
from advnorm.data.registry import DATASETS, DataSource, data_problems, list_datasets, load, register_dataset
from advnorm.data.svhn import read_svhn
from advnorm.data.synthetic import read_synthetic

__all__ = [
    "AUGMENTS",
    "DATASETS",
    "Batch",
    "DataSource",
    "FeatureFolder",
    "FolderData",
    "ImageData",
    "Loader",
    "ResidentLoader",
    "WorkerLoader",
    "add_split",
    "cifar10",
    "cifar100",
    "corrupt",
    "data_problems",
    "digits",
    "list_corruptions",
    "list_datasets",
    "load",
    "make_loader",
    "read_cifar10c",
    "read_imagefolder",
    "read_svhn",
    "read_synthetic",
    "register_dataset",
    "split_held_out",
]

"""E: Intriguing Properties of Adversarial Training. Figure 4 is a drawing."""

from advnorm.papers.e import appendices, sections, trainings

__all__ = ["appendices", "sections", "trainings"]

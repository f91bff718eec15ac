"""E: Intriguing Properties of Adversarial Training. Figure 4 is a drawing."""

from advnorm.papers.e import appendix, studies, trainings

__all__ = ["appendix", "studies", "trainings"]

"""Thresholds of the audit, with the reason for each.

The thresholds of the gap lie between pairs of PGD-10 and AutoAttack accuracy that the papers print (A tables 1 to 8;
C tables 1, 3 and 4). Soundly trained models keep a ratio of 0.46 to 0.94 of their PGD-10 accuracy and lose at most 14.3
points. Falsely robust models keep at most 0.14 and lose at least 21.9 points.
"""

from __future__ import annotations

# -- the gap between PGD-10 and the worst case -------------------------------------------------------------------------

#: A smaller gap, in points, is no sign: sound models at eps 8/255 lose 3 to 7 points.
GAP_POINTS = 8.0
#: A smaller ratio of worst case to PGD-10 is false: halfway between 0.14 and 0.46.
FALSE_RATIO = 0.3
#: A larger gap is false below this ratio: no sound model of the papers loses as much.
FALSE_POINTS, FALSE_POINTS_RATIO = 20.0, 0.6
#: A larger gap is false if this share of the images has zero gradients: PGD-10 then measures nothing.
ZERO_GRADIENT_SHARE, ZERO_GRADIENT_POINTS = 0.5, 15.0
#: A smaller ratio is a doubt, and false beside another doubt: sound models at eps 16/255 reach 0.46.
DOUBT_RATIO = 0.5
#: Slack, in images, when deciding whether a gap or an order of attacks is significant.
SLACK_IMAGES = 2

#: Share of the clean accuracy under one step from which on one step claims robustness: undefended models have less.
ONE_STEP_SHARE = 0.5

# -- no robustness -----------------------------------------------------------------------------------------------------

#: Up to this PGD-10 accuracy nobody claims robustness: undefended models have 0 to 2 %.
NONE_CLAIMED = 0.10
#: Up to this worst-case accuracy (or chance, if that is more) no robustness is left.
NONE_LEFT = 0.05
#: With fewer images the 95 % interval of an accuracy is wider than 18 points, and no verdict is real or false.
LEAST_IMAGES = 30

# -- other signs -------------------------------------------------------------------------------------------------------

#: Points by which a weaker attack may beat a stronger one: the effect of random starts.
ORDER_POINTS = 2.0
#: Points, or share of the accuracy, that more steps may take: sound models lose 1 to 3 points from 10 to 50 steps, and
#: the hybrid models of paper E keep falling (fig. 2).
STEPS_POINTS, STEPS_RATIO = 5.0, 0.15
#: Points that Square, or attacks on a copy, may take from the survivors of all gradient attacks: almost none on sound
#: models.
SURVIVOR_POINTS = 1.0
#: Share of correct images whose loss gradient may be exactly zero: a confident model has a few in float32.
ZERO_SHARE = 0.1
#: Points above chance that may remain at an eps that turns every image grey: a constant answer gets chance.
LARGE_EPS_POINTS = 3.0
#: Median difference of the two largest logits: float32 cross-entropy loses its gradient, exp(-88) underflows.
LOGIT_GAP = 50.0
#: Median angle, in degrees, between loss gradients at an image and beside it; more means shattered gradients.
GRADIENT_ANGLE = 40.0
#: Distance of the two points, as a share of eps.
ANGLE_STEP = 0.1

from attnplug.auto.measurement import MeasuredShape as MeasuredShape
from attnplug.auto.measurement import MeasuredTable as MeasuredTable
from attnplug.auto.measurement import Measurement as Measurement

from attnplug.auto.measurement import MeasuredShape as MeasuredShape
from attnplug.auto.measurement import MeasuredTable as MeasuredTable
from attnplug.auto.measurement import Measurement as Measurement
from attnplug.contract.raw import RawCalls as RawCalls
from attnplug.contract.raw import RawScene as RawScene

from attnplug.auto.table_store import MeasuredShape as MeasuredShape
from attnplug.auto.table_store import MeasuredTable as MeasuredTable
from attnplug.auto.table_store import Measurement as Measurement

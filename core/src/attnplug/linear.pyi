from attnplug.author.attention import PlannedBackend as PlannedBackend
from attnplug.contract.backend import LinearHooks as LinearHooks
from attnplug.contract.inputs import DeltaInputs as DeltaInputs
from attnplug.contract.inputs import DeltaWeights as DeltaWeights
from attnplug.contract.inputs import LinearInputs as LinearInputs
from attnplug.declare.model import LinearDims as LinearDims
from attnplug.kv.pools import LinearStatePool as LinearStatePool

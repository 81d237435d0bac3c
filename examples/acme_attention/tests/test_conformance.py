"""Conformance tests: everything that the backends claim, against float64."""

from attnplug_conformance.testing import conformance_tests, subject_of

test_mha, test_mha_claims_enough = conformance_tests(subject_of("acme_mha", "cpu"))
test_mla, test_mla_claims_enough = conformance_tests(subject_of("acme_mla", "cpu"))
test_linear, test_linear_claims_enough = conformance_tests(subject_of("acme_linear", "cpu"))
test_sparse, test_sparse_claims_enough = conformance_tests(subject_of("acme_sparse", "cpu"))

-- Adds this replica to locations, ends its leases on them, and notifies waiters.
-- KEYS: location, lease, for each address.
-- ARGV: token, time to live (ms), PUBLISH or SPUBLISH; then the grid, as in a record, of each address.
-- Returns 1 for each address.
local token, ttl_ms, notify = ARGV[1], ARGV[2], ARGV[3]
local MOST = 8 -- replicas to list for one address; the oldest is removed first
local ours, replies = set_of(token), {}
for i = 1, #KEYS, 2 do
  local location = without(get(KEYS[i]), ours) .. token .. ARGV[3 + (i + 1) / 2]
  redis.call('SET', KEYS[i], string.sub(location, -MOST * RECORD), 'PX', ttl_ms)
  local holder = get(KEYS[i + 1])
  if holder == token then
    redis.call('DEL', KEYS[i + 1])
  end
  if holder ~= '' then -- without a lease there are no waiters
    redis.call(notify, KEYS[i], '')
  end
  replies[#replies + 1] = 1
end
return replies

-- Releases leases of this replica, and notifies waiters.
-- KEYS: location, lease, for each address. ARGV: token, PUBLISH or SPUBLISH. Returns 1 for each address.
local replies = {}
for i = 1, #KEYS, 2 do
  if get(KEYS[i + 1]) == ARGV[1] then
    redis.call('DEL', KEYS[i + 1])
    redis.call(ARGV[2], KEYS[i], '')
  end
  replies[#replies + 1] = 1
end
return replies
